"""Seconds of whole training steps of a recipe, stage by stage, at real size with random weights.

See docs/performance.md.

    python tools/bench_step.py CONFIG.yaml … --gpus 2 [--steps 3] [--warmup 1] \\
        [--timeout-s 500] [--out FILE.json] [key=value …]

Runs `megadiff train` as a user would (replicas, rewards, sync, update; torchrun for several GPUs)
and stops it once --steps steps after --warmup are logged. A model folder that holds configs only
(assets/qwen_image) is first filled with random weights in --scratch; --layers and --text-layers
make it smaller. --rank-of N runs on one GPU as the first of N, without the links between them and
with a replica of its own (one_rank_train.py): seconds and memory before there are N GPUs, for FSDP2
over dp. Prints a table and one JSON object: medians of every stage, samples/s, TFLOP/s a
GPU of rollout and training (the model's own FLOPs: recomputation is not counted) and their share of
--peak-tflops, where a side multiplies in FP8 of --peak-fp8-tflops as well, peak memory of every
phase beside what `megadiff plan` says of this config, parity gap, hardware, versions. Without a GPU
it runs on the CPU. Exit codes: 0 done; 1 the run failed, or was not done after --timeout-s; 2
something asked for is wrong; 143 SIGTERM. With 1 and 143 the steps that were logged and the ends of
all logs are shown, and nothing that was started is left running.
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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from bench_machine import cpu_name, versions, visible_gpus

from megadiff.algorithms import build_algorithm
from megadiff.config.load import load_config
from megadiff.config.schema import Config
from megadiff.models.registry import build_adapter
from megadiff.observe.device_memory import GIB, phase_key
from megadiff.observe.metrics import format_number, read_rows
from megadiff.planner.memory_plan import USABLE_GIB, make_plan
from megadiff.planner.work import Machine
from megadiff.tensors.model_files import ROOT_FILE
from megadiff.train.components import forwards_per_sample
from megadiff.train.rows import rows_per_group, train_sampling
from megadiff.train.sampling import sampling_of
from megadiff.types import Sampling

POLL_S = 0.1
STOP_S = 60.0
LOG_LINES = 25
PLANNED = {
    "parity": "log_probs",
    "sync": "sync",
    "rollout": "rollout",
    "train": "update",
}  # phase → the planner's name


class Stopped(Exception):
    """SIGTERM: who started this wants it to end."""


def main(argv: list[str]) -> int:
    options, arguments = _parser().parse_known_args(argv)
    try:
        with _sigterm_raises():
            return _bench(
                options, arguments, command=shlex.join(["python", "tools/bench_step.py", *argv])
            )
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except Stopped:
        sys.stderr.write("error: stopped by SIGTERM\n")
        return 143


def _bench(options: argparse.Namespace, arguments: list[str], *, command: str) -> int:
    config = load_config([*options.config, *arguments])
    if options.rank_of:
        check_rank_of(config, options)
    with tempfile.TemporaryDirectory(prefix="bench_step_", dir=options.scratch) as scratch:
        model, made = _model(config, options, Path(scratch))
        config.model.path = str(model)
        planned = planned_gib(config, options)
        overrides = [
            *arguments,
            f"model.path={model}",
            f"run.dir={scratch}",
            "run.name=bench",
            "track=[]",
        ]
        overrides += [
            "sample_every=0",
            "eval.every=0",
            "checkpoint.every=0",
            "checkpoint.resume=never",
        ]
        overrides += [
            f"train.num_steps={options.warmup + options.steps + 1}"
        ]  # stopped before its end is saved
        log, folder = Path(scratch) / "log.txt", Path(scratch) / "bench"
        start, done = time.perf_counter(), False
        try:
            rows, late = _run([*options.config, *overrides], options, log, folder / "metrics.jsonl")
            seconds = time.perf_counter() - start
            done = len(rows) == options.warmup + options.steps
        finally:
            if not done:
                sys.stderr.write(_seen(log, folder))
        if not done:
            why = (
                f"not done after {options.timeout_s:g} s (--timeout-s)"
                if late
                else "the run failed"
            )
            sys.stderr.write(f"error: {why}\n")
            return 1
        report = {
            "command": command,
            "gpus": [name for _, name in visible_gpus()][: options.gpus],
            "cpu": cpu_name(),
            "versions": versions(),
            "start_s": round(seconds - sum(row["time/step_s"] for row in rows), 1),
            **made,
            **figures(rows[options.warmup :], config, model_folder=model, options=options),
            "memory_gib": memory_gib(rows, planned, warmup=options.warmup),
            # of every step, to compare runs bit for bit
            "losses": [row["loss/policy"] for row in rows if "loss/policy" in row],
            "grad_norms": [row["optim/grad_norm"] for row in rows],
            "parity": {key: value for key, value in rows[0].items() if key.startswith("parity/")},
        }
    if options.out:
        options.out.write_text(json.dumps(report, indent=1))
    sys.stdout.write(table(report) + json.dumps(report) + "\n")
    return 0


def figures(
    rows: list[dict], config: Config, *, model_folder: Path, options: argparse.Namespace
) -> dict:
    """Return medians over the rows, and rates from the model's FLOPs.

    The rate of rollout counts until the slowest rank has samples and rewards.
    """
    common = set.intersection(*(set(row) for row in rows))
    times = {key: _median(rows, key) for key in sorted(common) if key.startswith("time/")}
    adapter = build_adapter(model_folder, config.model.family)
    algorithm = build_algorithm(config.algorithm)
    samples = config.train.prompts_per_step * config.algorithm.group_size
    num_rows = config.train.prompts_per_step * rows_per_group(config, algorithm)

    def tflop(sampling: Sampling, num_forwards: float) -> float:
        forward = adapter.flops(sampling, options.text_tokens) / 1e12
        return forward * num_forwards / max(num_ranks(options), 1)

    rollout = tflop(sampling_of(config.rollout), samples * forwards_per_sample(config, adapter))
    backward = 1 if config.lora.rank else 2  # frozen weights have no gradient of their own
    train = tflop(train_sampling(config, algorithm), num_rows * (1 + backward))
    rates = {"rollout": rollout / times["time/sample_s"], "train": train / times["time/train_s"]}
    return {
        "samples": samples,
        "seconds": times,
        "samples_per_s": samples / times["time/step_s"],
        "tflops_per_gpu": rates,
        "mfu": {stage: rate / options.peak_tflops for stage, rate in rates.items()},
        "peak_tflops": options.peak_tflops,
        **_fp8_rates(rates, config, options),
        "peak_gib": max(row["memory/peak_gib"] for row in rows),
        "grad_norm": _median(rows, "optim/grad_norm"),
        "clip_fraction": statistics.fmean(row.get("policy/clip_fraction", 0.0) for row in rows),
        "zero_std_ratio": statistics.fmean(row["reward/zero_std_ratio"] for row in rows),
        "sync_gib": _median(rows, "sync/gib"),
    }


def _fp8_rates(rates: dict[str, float], config: Config, options: argparse.Namespace) -> dict:
    """Return the share of FP8's peak, of the sides that multiply in FP8; {} without any."""
    uses = {"rollout": config.rollout.fp8, "train": config.engine.fp8 != "none"}
    shares = {stage: rate / options.peak_fp8_tflops for stage, rate in rates.items() if uses[stage]}
    return {"mfu_fp8": shares, "peak_fp8_tflops": options.peak_fp8_tflops} if shares else {}


def planned_gib(config: Config, options: argparse.Namespace) -> dict[str, float]:
    """Return the planner's phase → its peak for this config on --gpus of --gpu.

    {} where the layout cannot run on them. The gate of a new run comes before AdamW's first step,
    which makes its state.
    """
    num_bytes, gpus = int(USABLE_GIB[options.gpu] * GIB), num_ranks(options)
    machine = Machine(
        world_size=gpus,
        gpus_per_node=options.gpus,
        num_bytes=num_bytes,
        host_bytes=psutil.virtual_memory().total,
        headroom=0.1,
    )
    own = make_plan(
        config,
        build_adapter(Path(config.model.path), config.model.family),
        machine=machine,
        text_tokens=options.text_tokens,
    ).configured
    if not own:
        return {}
    planned = {phase: own.peak(phase) for phase in own.phases}
    if "log_probs" in planned:
        planned["log_probs"] -= own.phases["log_probs"].get("optimizer", 0)
    return {phase: num_bytes / GIB for phase, num_bytes in planned.items()}


def num_ranks(options: argparse.Namespace) -> int:
    """Return the trainer's ranks, those that are not there included."""
    return options.rank_of or options.gpus


def check_rank_of(config: Config, options: argparse.Namespace) -> None:
    """Raise ValueError for what one rank of many cannot imitate."""
    sizes = {"--gpus": options.gpus, "sp": config.parallel.sp, "tp": config.parallel.tp}
    if config.engine.backend != "veomni" or set(sizes.values()) != {1}:
        found = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(
            f"--rank-of {options.rank_of} imitates FSDP2's collectives on one GPU, but found "
            f"engine.backend={config.engine.backend}, {found}; use engine.backend=veomni, --gpus 1 "
            "and no parallel.sp or parallel.tp"
        )


def memory_gib(
    rows: list[dict], planned: dict[str, float], *, warmup: int
) -> dict[str, dict[str, float]]:
    """Return phase → measured and planned GiB, each where it is known; {} on a CPU.

    Measured is of the fullest GPU, all processes, after the warmup; the gate is before it.
    """
    found: dict[str, dict[str, float]] = {}
    for phase, name in PLANNED.items():
        first, key = 0 if phase == "parity" else warmup, phase_key(phase)
        seen = [row[key] for row in rows[first:] if row.get(key)]
        if seen:
            found[phase] = {"measured": max(seen)} | (
                {"planned": planned[name]} if name in planned else {}
            )
    return found


def table(report: dict) -> str:
    """Return markdown: a row a stage, with its share of the step.

    Then a row a phase, with its memory.
    """
    step = report["seconds"]["time/step_s"]
    lines = ["| stage | s | share |", "|---|---|---|"]
    for key, seconds in sorted(report["seconds"].items(), key=lambda item: -item[1]):
        lines.append(
            f"| {key.removeprefix('time/').removesuffix('_s')} | {seconds:.3f} | "
            f"{seconds / step:.0%} |"
        )
    if report["memory_gib"]:
        lines += [
            "",
            "| phase | GiB measured | planned | measured / planned |",
            "|---|---|---|---|",
        ]
        lines += [_memory_row(phase, **found) for phase, found in report["memory_gib"].items()]
    mfu = report["mfu"]
    rates = ", ".join(
        f"{stage} {value:.0f} ({mfu[stage]:.0%})"
        for stage, value in report["tflops_per_gpu"].items()
    )
    lines.append(
        f"\n{report['samples']} samples a step, {report['samples_per_s']:.2f} a second; "
        "TFLOP/s a GPU (MFU of "
        f"{report['peak_tflops']:g}): {rates}; peak {report['peak_gib']:.1f} GiB of a trainer "
        "rank; "
        f"{report['start_s']:.0f} s to the first step\n"
    )
    if shares := report.get("mfu_fp8"):
        text = ", ".join(f"{stage} {share:.0%}" for stage, share in shares.items())
        lines.append(f"MFU of FP8's {report['peak_fp8_tflops']:g} TFLOP/s: {text}\n")
    if report["zero_std_ratio"]:
        lines.append(
            f"{100 * report['zero_std_ratio']:.2g} % of the groups have equal rewards. "
            "Training leaves them out where it can, "
            "and its TFLOP/s count them all. Random weights write no text: add "
            "reward.jpeg.type=jpeg_size.\n"
        )
    return "\n".join(lines) + "\n"


def _memory_row(phase: str, *, measured: float, planned: float | None = None) -> str:
    beside = f"{planned:.1f} | {measured / planned:.2f}" if planned else "– | –"
    return f"| {phase} | {measured:.1f} | {beside} |"


def _model(config: Config, options: argparse.Namespace, scratch: Path) -> tuple[Path, dict]:
    """Return the folder that is trained, and what is known of it.

    Its weights are random where it has none, or others are asked for.
    """
    folder = Path(config.model.path)
    has_weights = any((folder / "transformer").glob("*.safetensors"))
    has_weights = has_weights or (folder / ROOT_FILE).is_file()
    if has_weights and not (options.layers or options.text_layers):
        return folder, {}
    command = [
        sys.executable,
        str(Path(__file__).parent / "random_weights.py"),
        str(scratch / "model"),
    ]
    command += [
        "--model",
        str(folder),
        f"--layers={options.layers}",
        f"--text-layers={options.text_layers}",
    ]
    made = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True
    ).stdout.splitlines()[-1]
    return scratch / "model", {
        "random_weights": {k: v for k, v in json.loads(made).items() if k != "out"}
    }


def _run(
    arguments: list[str], options: argparse.Namespace, log: Path, metrics: Path
) -> tuple[list[dict], bool]:
    """Return the rows of `megadiff train`, and whether --timeout-s came first.

    It is stopped when there are enough rows.
    """
    wanted = options.warmup + options.steps
    end = time.monotonic() + (options.timeout_s or float("inf"))
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*_launcher(options), "train", *arguments],
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while (
                process.poll() is None and len(_rows(metrics)) < wanted and time.monotonic() < end
            ):
                time.sleep(POLL_S)
            late = process.poll() is None and time.monotonic() >= end
        finally:
            _stop(process)
    return _rows(metrics)[:wanted], late


def _launcher(options: argparse.Namespace) -> list[str]:
    """Return the command line of the CLI, by torchrun for several GPUs."""
    if options.rank_of:
        script = Path(__file__).parent / "one_rank_train.py"
        return [sys.executable, str(script), str(options.rank_of)]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.gpus}"]
    return [sys.executable, *(torchrun if options.gpus > 1 else []), "-m", "megadiff.cli.main"]


def _rows(metrics: Path) -> list[dict]:
    return [row for row in read_rows(metrics) if row["step"] > 0] if metrics.is_file() else []


def _stop(process: subprocess.Popen) -> None:
    """Stop the trainer, which stops its replicas.

    What is left after STOP_S of it, or of what it had started (torchrun's ranks and replicas have
    process groups of their own), is killed: it would hold the GPUs.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not leave it half stopped
    children = []
    if process.poll() is None:
        children = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        children += psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for child in children:
        with suppress(
            psutil.NoSuchProcess
        ):  # never another process with its number: psutil knows when each began
            child.kill()
    psutil.wait_procs(children, timeout=STOP_S)


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Stopped

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _seen(log: Path, folder: Path) -> str:
    """Return the ends of the logs, and the steps that were logged."""
    logs = [log, *sorted((folder / "logs").glob("*.log"))]
    parts = [f"--- {each.name}\n{_tail(each)}" for each in logs]
    for row in _rows(folder / "metrics.jsonl"):
        shown = {
            key: value
            for key, value in row.items()
            if key.startswith(("time/", "memory/", "parity/"))
        }
        parts.append(
            f"step {row['step']}: "
            + "  ".join(f"{key} {format_number(shown[key])}" for key in sorted(shown))
        )
    return "\n".join(parts) + "\n"


def _median(rows: list[dict], key: str) -> float:
    return statistics.median(row[key] for row in rows)


def _tail(path: Path) -> str:
    return (
        "\n".join(path.read_text(errors="replace").splitlines()[-LOG_LINES:])
        if path.is_file()
        else "(none)"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", nargs="*", help="yaml files, and key=value after the options")
    parser.add_argument("--gpus", type=int, default=1, help="trainer processes")
    parser.add_argument(
        "--rank-of",
        type=int,
        default=0,
        metavar="N",
        help="as the first of N GPUs, without their links",
    )
    parser.add_argument("--steps", type=int, default=3, help="that are measured")
    parser.add_argument("--warmup", type=int, default=1, help="steps before them")
    parser.add_argument(
        "--layers", type=int, default=0, help="of the random transformer; 0: as its config says"
    )
    parser.add_argument(
        "--text-layers",
        type=int,
        default=0,
        help="of the random text encoder; 0: as its config says",
    )
    parser.add_argument(
        "--timeout-s", type=float, default=0.0, help="of the run, which has failed then; 0: none"
    )
    parser.add_argument(
        "--text-tokens", type=int, default=64, help="of a prompt, for counting FLOPs and memory"
    )
    parser.add_argument(
        "--gpu", choices=sorted(USABLE_GIB), default="h200", help="that memory is planned for"
    )
    parser.add_argument(
        "--peak-tflops",
        type=float,
        default=761.0,
        help="what MFU is of; by default an H200's bfloat16 matrix products",
    )
    parser.add_argument(
        "--peak-fp8-tflops",
        type=float,
        default=1204.0,
        help="likewise in FP8; by default an H200's linears, forward and backward",
    )
    parser.add_argument(
        "--scratch", help="folder with room for the weights; by default the system's"
    )
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
