"""Prove that a change of the code changes no bit: the same seven runs in two checkouts.

    git worktree add ../before COMMIT
    python tools/compare_runs.py ../before . [--only one lora]

Each run is six float32 steps on a CPU: one process, data parallel, Ulysses, Megatron with tensor
parallelism, LoRA, Wan2.2 with two transformers, and supervised fine-tuning. Every figure of every
step must be the same bits, but for seconds, rates and memory. Figures that only one of the two
logs are named. About a minute a run and checkout. Exit code 0 when all are equal; else the first
difference of each run is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

OF_THE_MACHINE = ("time/", "perf/", "memory/", "rollout/replicas")
ROLLOUT = """
run: {device: cpu}
model: {dtype: float32}
train: {num_steps: 6, prompts_per_step: 4, updates_per_step: 2, microbatch_size: 4}
algorithm: {group_size: 4, clip_range: 1e-4}
rollout: {height: 64, width: 64, num_inference_steps: 6, sde_window_range: [0, 4]}
engine: {dtype: float32}
optim: {lr: 1e-4}
reward: {color: {type: color}}
track: []
"""
VIDEO = {"color": {"type": "frame", "args": {"reward": "color"}}}
SUPERVISED = (
    "algorithm.name=sft",
    "algorithm.group_size=2",
    "algorithm.ema_decay=0.99",
    "train.prompts_per_step=2",
    "train.updates_per_step=1",
    "train.microbatch_size=3",
    "optim.lr=1e-3",
    "rollout.num_inference_steps=3",
)
# name → (family of the tiny model, number of ranks, overrides)
RUNS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "one": ("qwen_image", 1, ()),
    "dp": ("qwen_image", 2, ("parallel.dp=2",)),
    "sp": ("qwen_image", 2, ("parallel.sp=2",)),
    "megatron_tp": ("qwen_image", 2, ("engine.backend=megatron", "parallel.tp=2")),
    "lora": ("qwen_image", 1, ("lora.rank=4", "lora.alpha=8", "optim.lr=1e-3")),
    "wan_two_transformers": (
        "wan22_t2v_a14b",
        1,
        ("rollout.num_frames=5", "rollout.sde_window_range=[0,5]", f"reward={json.dumps(VIDEO)}"),
    ),
    "sft": ("qwen_image", 1, SUPERVISED),
}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, help="a checkout")
    parser.add_argument("after", type=Path, help="another checkout")
    parser.add_argument("--only", nargs="+", choices=sorted(RUNS), default=sorted(RUNS))
    parser.add_argument("--timeout-s", type=float, default=600.0, help="of a run")
    options = parser.parse_args(argv)
    num_different = 0
    with tempfile.TemporaryDirectory(prefix="compare_runs_") as scratch:
        for name in options.only:
            before, after = (
                metrics(checkout.resolve(), name, Path(scratch), options.timeout_s)
                for checkout in (options.before, options.after)
            )
            # A figure that one of the two never logs is named. One that it logs in other steps is
            # a difference.
            logged_by_one = set().union(*before) ^ set().union(*after)
            difference = first_difference(before, after, logged_by_one)
            num_figures = sum(len(row) for row in after)
            verdict = difference or f"{num_figures} figures, all the same bits"
            if logged_by_one:
                verdict += f"; logged by one alone: {', '.join(sorted(logged_by_one))}"
            print(f"{name}: {verdict}", flush=True)
            num_different += bool(difference)
    return 1 if num_different else 0


def metrics(checkout: Path, name: str, scratch: Path, timeout_s: float) -> list[dict[str, object]]:
    """Return what the run logged, one dict a step, without what belongs to the machine."""
    family, num_ranks, overrides = RUNS[name]
    folder = Path(tempfile.mkdtemp(dir=scratch))
    environment = os.environ | {
        "PYTHONPATH": str(checkout),
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
    }
    (folder / "config.yaml").write_text(ROLLOUT)
    data = f"data.prompts={checkout / 'assets/prompts/colors.txt'}"
    if name == "sft":
        write_images(folder / "images")
        data = f"data.images={folder / 'images'}"
    arguments = (
        "train",
        str(folder / "config.yaml"),
        data,
        f"model.path={folder / 'model'}",
        f"run.dir={folder}",
        "run.name=run",
        *overrides,
    )
    # Its own .venv where it has one: the entry points of an installation name its modules.
    own_python = checkout / ".venv" / "bin" / "python"
    python = str(own_python) if own_python.exists() else sys.executable
    launcher = [python, "-m"]
    if num_ranks > 1:
        launcher += ["torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}", "-m"]
    tool = [python, str(checkout / "tools/make_tiny_model.py")]
    for command in (
        [*tool, str(folder / "model"), "--family", family],
        [*launcher, "megadiff.cli.main", *arguments],
    ):
        done = subprocess.run(
            command,
            cwd=checkout,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        if done.returncode:
            sys.exit(f"{name} failed in {checkout}:\n{done.stderr[-3000:]}")
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [
        {key: value for key, value in row.items() if not key.startswith(OF_THE_MACHINE)}
        for row in rows
    ]


def write_images(folder: Path) -> None:
    """Write six pictures of one colour each, with captions."""
    folder.mkdir()
    rows = []
    for number in range(6):
        pixels = np.full((64, 64, 3), 40 * number, dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        rows.append(json.dumps({"file_name": f"{number}.png", "caption": f"a wall, {number}"}))
    (folder / "metadata.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")


def first_difference(
    before: list[dict[str, object]], after: list[dict[str, object]], without: set[str]
) -> str:
    """Return '' where both are equal, else where they differ first.

    JSON carries a float exactly.
    """
    if len(before) != len(after):
        return f"{len(before)} steps before, {len(after)} after"
    for old, new in zip(before, after, strict=True):
        for key in sorted((old.keys() | new.keys()) - without):
            if old.get(key) != new.get(key):
                return f"step {new.get('step')}: {key} was {old.get(key)}, is {new.get(key)}"
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
