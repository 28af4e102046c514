"""Seconds of whole training steps of a recipe, stage by stage, at real size with random weights.

See docs/performance.md.

    python tools/bench_step.py CONFIG.yaml … --gpus 2 [--steps 3] [--warmup 1] \\
        [--timeout-s 500] [--out FILE.json] [key=value …]

Runs `megadiff train` as a user would (replicas, rewards, sync, update; torchrun for several GPUs)
and stops it once --steps steps after --warmup are logged. A model folder that holds configs only
(assets/qwen_image) is first filled with random weights in --scratch; --layers and --text-layers
make it smaller. --rank-of N runs on one GPU as the first of N, without the links between them and
with a replica of its own (one_rank_train.py): seconds and memory before there are N GPUs, for FSDP2
over dp. --hold leaves as much memory free as --gpu has, so that a larger GPU shows whether the run
fits that one; its seconds are the larger one's. Prints a table and one JSON object: medians of
every stage, samples/s, TFLOP/s a GPU of rollout and training (the model's own FLOPs: recomputation
is not counted) and their share of --peak-tflops, where a side multiplies in FP8 of
--peak-fp8-tflops as well, peak memory of every phase beside what `megadiff plan` says of this
config, parity gap, hardware, versions. Without a GPU it runs on the CPU.

Exit codes: 0 done; 1 the run failed, or was not done after --timeout-s; 2 something asked for is
wrong; 143 SIGTERM. With 1 and 143 the steps that were logged and the ends of all logs are shown,
and nothing that was started is left running. What the run trained is not saved.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

import psutil
from bench_machine import add_depths, machine, tool_parser
from held_memory import hold_all_but
from one_rank import check_alone
from step_figures import figures, memory_gib, planned_gib, table

from megadiff.config.load import load_config
from megadiff.config.schema import Config
from megadiff.observe.metrics import format_number, read_rows
from megadiff.planner.memory_plan import USABLE_GIB
from megadiff.tensors.model_files import ROOT_FILE
from megadiff.train.stop import AGAIN_S

ALONE = (  # nothing is recorded beside the steps
    "run.name=bench",
    "track=[]",
    "sample_every=0",
    "eval.every=0",
    "checkpoint.every=0",
    "checkpoint.resume=never",
)
GAP = "policy/log_prob_gap_mean"
POLL_S = 0.1
GRACE_S = AGAIN_S + 1.0
STOP_S = 60.0
LOG_LINES = 25


class Stopped(Exception):
    """SIGTERM: who started this wants it to end."""


def main(argv: list[str]) -> int:
    options, arguments = _parser().parse_known_args(argv)
    try:
        with _sigterm_raises():
            command = shlex.join(["python", "tools/bench_step.py", *argv])
            return _bench(options, arguments, command=command)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except Stopped:
        sys.stderr.write("error: stopped by SIGTERM\n")
        return 143


def _bench(options: argparse.Namespace, arguments: list[str], *, command: str) -> int:
    config = load_config([*options.config, *arguments])
    if options.rank_of:
        sizes = {"--gpus": options.gpus, "sp": config.parallel.sp, "tp": config.parallel.tp}
        check_alone(options.rank_of, config.engine.backend, sizes)
    with (
        tempfile.TemporaryDirectory(prefix="bench_step_", dir=options.scratch) as scratch,
        _held(options) as held_gib,
    ):
        model, made = _model(config, options, Path(scratch))
        config.model.path = str(model)
        planned = planned_gib(config, options)
        overrides = [*arguments, f"model.path={model}", f"run.dir={scratch}", *ALONE]
        # stopped before its end is saved
        overrides.append(f"train.num_steps={options.warmup + options.steps + 1}")
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
            limit = f"not done after {options.timeout_s:g} s (--timeout-s)"
            why = limit if late else "the run failed"
            sys.stderr.write(f"error: {why}\n")
            return 1
        here = machine()
        report = {
            "command": command,
            **here | {"gpus": here["gpus"][: options.gpus]},
            "start_s": round(seconds - sum(row["time/step_s"] for row in rows), 1),
            **made,
            **figures(rows[options.warmup :], config, model_folder=model, options=options),
            "memory_gib": memory_gib(rows, planned, warmup=options.warmup, held_gib=held_gib),
            "held_gib": held_gib,
            # of every step: which are slow, and to compare runs bit for bit
            "steps_s": [round(row["time/step_s"], 3) for row in rows],
            "losses": [row["loss/policy"] for row in rows if "loss/policy" in row],
            "grad_norms": [row["optim/grad_norm"] for row in rows],
            "log_prob_gaps": [row[GAP] for row in rows if GAP in row],
            "parity": {key: value for key, value in rows[0].items() if key.startswith("parity/")},
        }
    if options.out:
        options.out.write_text(json.dumps(report, indent=1))
    sys.stdout.write(table(report) + json.dumps(report) + "\n")
    return 0


def _held(options: argparse.Namespace) -> AbstractContextManager[float]:
    """Return what holds memory of the GPUs, and gives its GiB."""
    if not options.hold:
        return nullcontext(0.0)
    return hold_all_but(USABLE_GIB[options.gpu], num_gpus=options.gpus)


def _model(config: Config, options: argparse.Namespace, scratch: Path) -> tuple[Path, dict]:
    """Return the folder that is trained, and what is known of it.

    Its weights are random where it has none, or others are asked for.
    """
    folder = Path(config.model.path)
    has_weights = any((folder / "transformer").glob("*.safetensors"))
    has_weights = has_weights or (folder / ROOT_FILE).is_file()
    if has_weights and not (options.layers or options.text_layers):
        return folder, {}
    out = scratch / "model"
    tool = Path(__file__).with_name("random_weights.py")
    command = [sys.executable, str(tool), str(out), "--model", str(folder)]
    command += [f"--layers={options.layers}", f"--text-layers={options.text_layers}"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    made = json.loads(done.stdout.splitlines()[-1])
    del made["out"]
    return out, {"random_weights": made}


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
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        if process.poll() is None:  # the second one: what it trained need not be saved
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        children += psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for child in children:
        # never another process with its number: psutil knows when each began
        with suppress(psutil.NoSuchProcess):
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
        keys = [key for key in sorted(row) if key.startswith(("time/", "memory/", "parity/"))]
        figures = "  ".join(f"{key} {format_number(row[key])}" for key in keys)
        parts.append(f"step {row['step']}: {figures}")
    return "\n".join(parts) + "\n"


def _tail(path: Path) -> str:
    if not path.is_file():
        return "(none)"
    return "\n".join(path.read_text(errors="replace").splitlines()[-LOG_LINES:])


def _parser() -> argparse.ArgumentParser:
    parser = tool_parser(__doc__)
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
    add_depths(parser)
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
        "--hold", action="store_true", help="hold what a larger GPU has more than --gpu"
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
