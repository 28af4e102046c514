"""Seconds of whole training steps of a recipe, stage by stage, at real size with random weights. See docs/performance.md.

    python tools/bench_step.py CONFIG.yaml … --gpus 2 [--steps 3] [--warmup 1] [--out FILE.json] [key=value …]

Runs `megadiff train` as a user would (replicas, rewards, sync, update; torchrun for several GPUs) and stops it once --steps
steps after --warmup are logged. A model folder that holds configs only (assets/qwen_image) is first filled with random
weights in --scratch; --layers and --text-layers make it smaller. Prints a table and one JSON object: medians of every
stage, samples/s, TFLOP/s a GPU of rollout and training (the model's own FLOPs: recomputation is not counted), peak memory,
parity gap, hardware, versions. Without a GPU it runs on the CPU. Exit codes: 0 done, 1 the run failed (the end of its log
is shown), 2 something asked for is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench_machine import cpu_name, versions, visible_gpus

from megadiff.config.load import load_config
from megadiff.config.schema import Config
from megadiff.models.registry import build_adapter
from megadiff.observe.metrics import read_rows
from megadiff.train.rollout import sampling_of

POLL_S = 0.1
STOP_S = 60.0
LOG_LINES = 25


def main(argv: list[str]) -> int:
    options, arguments = _parser().parse_known_args(argv)
    try:
        config = load_config([*options.config, *arguments])
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    with tempfile.TemporaryDirectory(prefix="bench_step_", dir=options.scratch) as scratch:
        model, made = _model(config, options, Path(scratch))
        overrides = [*arguments, f"model.path={model}", f"run.dir={scratch}", "run.name=bench", "track=[]"]
        overrides += ["sample_every=0", "eval.every=0", "checkpoint.every=0", "checkpoint.resume=never"]
        overrides += [f"train.num_steps={options.warmup + options.steps + 1}"]  # stopped before its end is saved
        log, folder = Path(scratch) / "log.txt", Path(scratch) / "bench"
        start = time.perf_counter()
        rows = _run([*options.config, *overrides], options, log, folder / "metrics.jsonl")
        seconds = time.perf_counter() - start
        if len(rows) < options.warmup + options.steps:
            logs = [log, *sorted((folder / "logs").glob("*.log"))]
            sys.stderr.write(
                "\n".join(f"--- {each.name}\n{_tail(each)}" for each in logs) + "\nerror: the run failed\n"
            )
            return 1
    report = {
        "command": shlex.join(["python", "tools/bench_step.py", *argv]),
        "gpus": [name for _, name in visible_gpus()][: options.gpus],
        "cpu": cpu_name(),
        "versions": versions(),
        "start_s": round(seconds - sum(row["time/step_s"] for row in rows), 1),
        **made,
        **figures(rows[options.warmup :], config, model_folder=Path(config.model.path), options=options),
        "parity": {key: value for key, value in rows[0].items() if key.startswith("parity/")},
    }
    if options.out:
        options.out.write_text(json.dumps(report, indent=1))
    sys.stdout.write(table(report) + json.dumps(report) + "\n")
    return 0


def figures(rows: list[dict], config: Config, *, model_folder: Path, options: argparse.Namespace) -> dict:
    """Medians over the rows, and rates from the model's FLOPs."""
    times = {key: _median(rows, key) for key in rows[0] if key.startswith("time/")}
    adapter, sampling = build_adapter(model_folder), sampling_of(config.rollout)
    samples = config.train.prompts_per_step * config.algorithm.group_size
    one_step = adapter.flops(sampling, options.text_tokens) * samples / max(options.gpus, 1) / 1e12
    rollout = one_step * sampling.num_inference_steps
    train = one_step * sampling.sde_window_size * 3  # forward, and twice that backward
    if config.lora.rank:
        train = one_step * sampling.sde_window_size * 2  # frozen weights have no gradient of their own
    return {
        "samples": samples,
        "seconds": times,
        "samples_per_s": samples / times["time/step_s"],
        "tflops_per_gpu": {
            "rollout": rollout / times["time/rollout_s"],
            "train": train / times["time/train_s"],
        },
        "peak_gib": max(row["memory/peak_gib"] for row in rows),
        "grad_norm": _median(rows, "optim/grad_norm"),
        "sync_gib": _median(rows, "sync/gib"),
    }


def table(report: dict) -> str:
    """Markdown: a row a stage, with its share of the step."""
    step = report["seconds"]["time/step_s"]
    lines = ["| stage | s | share |", "|---|---|---|"]
    for key, seconds in sorted(report["seconds"].items(), key=lambda item: -item[1]):
        lines.append(f"| {key.removeprefix('time/').removesuffix('_s')} | {seconds:.3f} | {seconds / step:.0%} |")
    rates = ", ".join(f"{stage} {value:.0f}" for stage, value in report["tflops_per_gpu"].items())
    lines.append(
        f"\n{report['samples']} samples a step, {report['samples_per_s']:.2f} a second; TFLOP/s a GPU: {rates}; "
        f"peak {report['peak_gib']:.1f} GiB of a trainer rank; {report['start_s']:.0f} s to the first step\n"
    )
    return "\n".join(lines) + "\n"


def _model(config: Config, options: argparse.Namespace, scratch: Path) -> tuple[Path, dict]:
    """The folder that is trained, and what is known of it: with random weights where it has none, or others are asked for."""
    folder = Path(config.model.path)
    has_weights = any((folder / "transformer").glob("*.safetensors"))
    if has_weights and not (options.layers or options.text_layers):
        return folder, {}
    command = [sys.executable, str(Path(__file__).parent / "random_weights.py"), str(scratch / "model")]
    command += ["--model", str(folder), f"--layers={options.layers}", f"--text-layers={options.text_layers}"]
    made = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]
    return scratch / "model", {"random_weights": {k: v for k, v in json.loads(made).items() if k != "out"}}


def _run(arguments: list[str], options: argparse.Namespace, log: Path, metrics: Path) -> list[dict]:
    """The rows of `megadiff train`, which is stopped when there are enough of them."""
    launcher = [sys.executable, "-m", "megadiff.cli.main"]
    if options.gpus > 1:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.gpus}"]
        launcher += ["-m", "megadiff.cli.main"]
    wanted = options.warmup + options.steps
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*launcher, "train", *arguments], stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while process.poll() is None and len(_rows(metrics)) < wanted:
                time.sleep(POLL_S)
        finally:
            _stop(process)
    return _rows(metrics)[:wanted]


def _rows(metrics: Path) -> list[dict]:
    return [row for row in read_rows(metrics) if row["step"] > 0] if metrics.is_file() else []


def _stop(process: subprocess.Popen) -> None:
    """The trainer stops its replicas; what is left of its process group after STOP_S is killed."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _median(rows: list[dict], key: str) -> float:
    return statistics.median(row[key] for row in rows)


def _tail(path: Path) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-LOG_LINES:]) if path.is_file() else "(none)"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="*", help="yaml files, and key=value after the options")
    parser.add_argument("--gpus", type=int, default=1, help="trainer processes")
    parser.add_argument("--steps", type=int, default=3, help="that are measured")
    parser.add_argument("--warmup", type=int, default=1, help="steps before them")
    parser.add_argument("--layers", type=int, default=0, help="of the random transformer; 0: as its config says")
    parser.add_argument("--text-layers", type=int, default=0, help="of the random text encoder; 0: as its config says")
    parser.add_argument("--text-tokens", type=int, default=64, help="of a prompt, for counting FLOPs")
    parser.add_argument("--scratch", help="folder with room for the weights; by default the system's")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
