"""Seconds of a step with samples drawn one step ahead, beside those of a run that takes turns.

    python tools/bench_ahead.py [CONFIG.yaml …] [--steps 12] [--warmup 2] [--gpu] \\
        [--trainer 0] [--replicas 1] [--staleness 0 1] [--out FILE.json] [key=value …]

The same run with each train.staleness, on replicas that are started once: `megadiff
serve` of the same config, one for each core or GPU of --replicas. --trainer and --replicas are the
numbers of cores to which the processes are bound, or with --gpu of GPUs; `--replicas 1,2` are two
replicas. The default config is configs/quickstart.yaml without its evaluations, on two cores.

Prints a row for each run: median seconds of the steps after --warmup, in all and by stage, how many
were hidden, and a step over the longer one of rollout and train. "ideal" is the longer one of
rollout and the rest of a step that takes turns. With --out that is one JSON object as well, with
hardware and versions. Exit codes: 0 done, 1 a run failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from bench_machine import cpu_name, tool_parser, versions, visible_gpus, with_default
from marked import ROOT, python_path

from megadiff.observe.metrics import column, median, read_rows

QUICKSTART = ROOT / "configs" / "quickstart.yaml"
START_S = 600.0
STOP_S = 30.0
STAGES = ("step", "rollout", "reward", "sample", "train", "sync", "hidden")


def main(argv: list[str]) -> int:
    options, settings = _parser().parse_known_args(argv)
    settings = with_default(settings, [str(QUICKSTART)])
    with tempfile.TemporaryDirectory(prefix="bench_ahead_") as scratch:
        folder = Path(scratch)
        places = [int(place) for place in options.replicas.split(",")]
        keys = run_keys(settings, folder, num_replicas=len(places), num_steps=options.steps)
        with replicas(keys, places, folder, on_gpu=options.gpu):
            rows = []
            for staleness in options.staleness:
                rows.append(measured(keys, staleness, folder, options))
                table(rows[-1:], with_head=len(rows) == 1)  # at once: the next may not end in time

    compared = comparison(rows)
    if compared:
        print(
            "a step ahead takes {ratio:.3f} of taking turns; ideal {ideal:.3f}".format(**compared)
        )
    if options.out:
        record = {
            "runs": rows,
            **compared,
            "settings": settings,
            "cpu": cpu_name(),
            "gpus": visible_gpus(),
            "versions": versions(),
        }
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


def run_keys(
    settings: Sequence[str], folder: Path, *, num_replicas: int, num_steps: int
) -> list[str]:
    """Return the config files and overrides that trainer and replicas share."""
    return [
        *settings,
        f"run.dir={folder}",
        "rollout.mode=separate",
        f"rollout.registry={folder / 'registry'}",
        f"rollout.num_replicas={num_replicas}",
        f"train.num_steps={num_steps}",
        "eval.every=0",
        "checkpoint.every=0",
        "track=[]",
    ]


@contextmanager
def replicas(
    keys: Sequence[str], places: Sequence[int], folder: Path, *, on_gpu: bool
) -> Iterator[None]:
    """Run a replica at each place, from when all are announced."""
    processes = []
    try:
        for index, place in enumerate(places):
            own = ["--name", f"replica_{index}"]
            log = folder / f"replica_{index}.log"
            processes.append(start(["serve", *keys, *own], place, log, on_gpu=on_gpu))
        deadline = time.monotonic() + START_S
        while len(list((folder / "registry").glob("*.json"))) < len(places):
            if any(process.poll() is not None for process in processes):
                sys.exit(f"a replica ended:\n{log.read_text(errors='replace')[-3000:]}")
            if time.monotonic() > deadline:
                sys.exit(f"the replicas did not start within {START_S:.0f} s")
            time.sleep(0.2)
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


def start(arguments: Sequence[str], place: int, log: Path, *, on_gpu: bool) -> subprocess.Popen:
    """Start a command of megadiff, bound to a core or a GPU."""
    settings = {"PYTHONPATH": python_path(), "TOKENIZERS_PARALLELISM": "false"}
    environment = os.environ | settings
    bind = None
    if on_gpu:
        environment["CUDA_VISIBLE_DEVICES"] = str(place)
    else:
        # A thread that waits must not take the core of those that work.
        environment |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        bind = partial(os.sched_setaffinity, 0, {place})
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "megadiff.cli.main", *arguments],
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment,
            preexec_fn=bind,
        )


def measured(
    keys: Sequence[str], staleness: int, folder: Path, options: argparse.Namespace
) -> dict[str, float]:
    """Run it, and return the median seconds of its steps by stage."""
    name = f"staleness_{staleness}"
    log = folder / f"{name}.log"
    own = [f"run.name={name}", f"train.staleness={staleness}"]
    process = start(["train", *keys, *own], options.trainer, log, on_gpu=options.gpu)
    try:
        code = process.wait()
    except BaseException:
        process.terminate()
        process.wait(STOP_S)
        raise
    if code:
        sys.exit(f"{name} failed:\n{log.read_text(errors='replace')[-3000:]}")

    rows = [row for row in read_rows(folder / name / "metrics.jsonl") if row["step"]]
    rows = rows[options.warmup :]
    # The last step of a run that draws ahead has nothing to draw.
    rows = rows[:-1]
    seconds = {f"{stage}_s": median(column(rows, f"time/{stage}_s")) or 0.0 for stage in STAGES}
    of_longer = seconds["step_s"] / max(seconds["rollout_s"], seconds["train_s"])
    return {"staleness": staleness, "steps": len(rows), **seconds, "of_longer": of_longer}


def comparison(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return what a step ahead takes of taking turns, and the least it could; {} without both."""
    by_staleness = {row["staleness"]: row for row in rows}
    if not by_staleness.keys() >= {0, 1}:
        return {}
    turns = by_staleness[0]
    ideal_s = max(turns["rollout_s"], turns["step_s"] - turns["rollout_s"])
    return {
        "ratio": by_staleness[1]["step_s"] / turns["step_s"],
        "ideal": ideal_s / turns["step_s"],
    }


def table(rows: Sequence[dict[str, float]], *, with_head: bool) -> None:
    if with_head:
        print(f"{'staleness':>9}", *(f"{stage:>8}" for stage in STAGES), "step/longer")
    for row in rows:
        seconds = [f"{row[f'{stage}_s']:8.3f}" for stage in STAGES]
        print(f"{row['staleness']:>9}", *seconds, f"{row['of_longer']:11.3f}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = tool_parser(__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=2, help="steps that do not count")
    parser.add_argument("--gpu", action="store_true", help="places are GPUs, not cores")
    parser.add_argument("--trainer", type=int, default=0, help="its core or GPU")
    parser.add_argument("--replicas", default="1", help="cores or GPUs, one for each replica")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1], choices=[0, 1])
    parser.add_argument("--out", type=Path)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
