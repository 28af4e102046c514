"""The RL-gain benchmark: how far, and how fast, RL takes a model's held-out score.

See docs/shapes.md.

    python tools/bench_gain.py [CONFIG.yaml …] --out DIR [--seeds 0 1 2] [--vary key=v1,v2 …] \\
        [--algorithms NAME …] [--parallel N] [key=value …]

Runs `megadiff train` once per setting (the product of --algorithms and all --vary) and seed, and
compares: start and end score, steps and seconds to the target, seconds per step, diversity, alarms.
A table goes to stdout; DIR gets gain.json, gain.svg and the runs with their logs. The same command
again continues: finished runs are kept, others start over. Without a config:
configs/shapes/flowgrpo.yaml. On several GPUs each of the parallel runs has one for itself while
there are enough.

Exit codes: 0 done, 1 a run failed, 2 something asked for is wrong, 130 or 143 interrupted.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench_machine import cpu_name, is_override, tool_parser, versions, visible_gpus
from gain_curves import (
    Point,
    RunResult,
    alarms_of,
    curves,
    error_of,
    figures_of,
    mean_step_s,
    plot,
    points_of,
    score_text,
    stage_medians,
    table,
)
from gain_jobs import ALGORITHMS, DEFAULT_CONFIG, Job, jobs_of

from megadiff.config.load import load_config
from megadiff.observe.metrics import parse_row, read_rows
from megadiff.observe.text_files import write_whole

logger = logging.getLogger("bench_gain")
POLL_S = 0.05  # rows are stamped when they are seen: seconds are good to this
STOP_S = 60.0  # a run that is told to stop has this long to stop its replicas


@dataclass(kw_only=True)
class Active:
    """A run whose process has started.

    stamps_s: step → seconds since the process started at which its row was seen.
    """

    job: Job
    slot: int
    device: str
    process: subprocess.Popen
    start_s: float
    offset: int = 0
    stamps_s: dict[int, float] = field(default_factory=dict)

    def look(self) -> None:
        """Stamp the rows that are new in metrics.jsonl."""
        path = self.job.folder / "metrics.jsonl"
        if not path.exists() or path.stat().st_size == self.offset:
            return
        with path.open("rb") as file:
            file.seek(self.offset)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self.offset += len(whole)
        for row in filter(None, map(parse_row, whole.decode("utf-8").splitlines())):
            step = int(row["step"])  # type: ignore[arg-type]
            self.stamps_s[step] = time.monotonic() - self.start_s
            scores = [
                f"{key} {value:.3f}"
                for key, value in row.items()
                if key.startswith("eval/") and value is not None
            ]
            if scores:
                shown = "  ".join(scores)
                logger.info("%s: step %d  %s", self.job.name, step, shown)


def kept_result(job: Job) -> RunResult | None:
    """Return the result of a run that finished earlier.

    ValueError when that run was another one than is asked for now.
    """
    if not job.result_path.exists():
        return None
    plain = json.loads(job.result_path.read_text("utf-8"))
    plain["points"] = [Point(**point) for point in plain["points"]]
    plain["alarms"] = [tuple(alarm) for alarm in plain["alarms"]]
    result = RunResult(**plain)
    if result.exit_code:
        return None
    if result.arguments != job.arguments:
        raise ValueError(
            f"{job.result_path} is of a run with {' '.join(result.arguments)}, now "
            f"{' '.join(job.arguments)} is asked for; give another --out"
        )
    return result


def start(job: Job, slot: int, gpus: Sequence[tuple[str, str]], *, lock: int) -> Active:
    """Start the run's process in a session of its own, from an empty folder."""
    shutil.rmtree(job.folder, ignore_errors=True)  # of a run that was interrupted or failed
    job.runs_folder.mkdir(parents=True, exist_ok=True)
    environment = {"TOKENIZERS_PARALLELISM": "false", **os.environ}
    device = cpu_name()
    if gpus:
        index, name = gpus[slot % len(gpus)]
        environment["CUDA_VISIBLE_DEVICES"], device = index, f"{name} ({index})"
    with job.log_path.open("wb") as log:
        process = subprocess.Popen(
            job.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
            pass_fds=[lock],
        )
    logger.info("%s: started on %s, log %s", job.name, device, job.log_path)
    return Active(job=job, slot=slot, device=device, process=process, start_s=time.monotonic())


def finish(active: Active) -> RunResult:
    """Return the result of a run whose process has ended, and write it beside its folder."""
    process_s = time.monotonic() - active.start_s
    active.look()
    job, code = active.job, active.process.returncode
    rows = read_rows(job.folder / "metrics.jsonl")
    log = job.log_path.read_text("utf-8", errors="replace")
    result = RunResult(
        setting=job.setting,
        seed=job.seed,
        arguments=job.arguments,
        metric=job.metric,
        exit_code=code,
        error=error_of(log) if code else "",
        device=active.device,
        process_s=round(process_s, 2),
        points=points_of(rows, active.stamps_s, log, job.metric),
        inside_s=mean_step_s(rows),
        stages_s=stage_medians(rows),
        alarms=alarms_of(log),
        versions=versions(),
    )
    write_whole(job.result_path, json.dumps(asdict(result)))
    # of many scores the first and the last
    ends = result.scored[:: max(1, len(result.scored) - 1)]
    outcome = f"{job.metric} {' → '.join(score_text(point.score) for point in ends)}"
    if code:
        outcome = f"failed, exit code {code}: {result.error}"
    logger.info("%s: %s, %.0f s", job.name, outcome, process_s)
    return result


@contextmanager
def locked(out: Path) -> Iterator[int]:
    """Return a descriptor that keeps `out` ours.

    Runs inherit it, so that the folder stays taken while one of them lives, even if this process is
    killed. ValueError when it is taken.
    """
    out.mkdir(parents=True, exist_ok=True)
    with (out / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"{out} is in use by another benchmark, or by a run that one left; end it, or "
                "give another --out"
            ) from error
        yield file.fileno()


def run_all(
    jobs: Sequence[Job], options: argparse.Namespace, gpus: Sequence[tuple[str, str]], *, lock: int
) -> list[RunResult]:
    """Run what is not finished yet, --parallel at a time, and keep the record in --out up to date.

    An interrupt stops the runs that have started. Returns the results in the order of the jobs.
    """
    results = {job.name: result for job in jobs if (result := kept_result(job)) is not None}
    waiting = deque(job for job in jobs if job.name not in results)
    logger.info("%d runs, %d of them finished earlier", len(jobs), len(results))
    active: list[Active] = []

    def record() -> list[RunResult]:
        """Write what there is, and return it in the order of the jobs."""
        done = [results[job.name] for job in jobs if job.name in results]
        write_record(done, len(jobs), options, gpus)
        return done

    try:
        while waiting or active:
            while waiting and len(active) < options.parallel:
                slot = min(set(range(options.parallel)) - {each.slot for each in active})
                active.append(start(waiting.popleft(), slot, gpus, lock=lock))
            for each in list(active):
                # asked first: its last rows are then in the file
                has_ended = each.process.poll() is not None
                each.look()
                if has_ended:
                    active.remove(each)
                    results[each.job.name] = finish(each)
                    record()
            time.sleep(POLL_S)
    finally:
        stop(active)
    return record()


def stop(active: Sequence[Active]) -> None:
    """Tell runs to stop and wait; kill the whole sessions of those that do not."""
    for each in active:
        each.process.terminate()
    for each in active:
        try:
            each.process.wait(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(each.process.pid, signal.SIGKILL)
            each.process.wait()


def write_record(
    runs: Sequence[RunResult],
    num_asked: int,
    options: argparse.Namespace,
    gpus: Sequence[tuple[str, str]],
) -> None:
    """Write gain.json and gain.svg of the runs that have ended so far."""
    figures = [figures_of(run, options.target) for run in runs]
    record = {
        "command": ["python", "tools/bench_gain.py", *options.command],
        "hardware": {
            "cpu": cpu_name(),
            "gpus": [name for _, name in gpus],
            "parallel": options.parallel,
        },
        "target": options.target,
        "num_runs_asked": num_asked,
        "runs": [
            asdict(run) | {"figures": asdict(found) if found else None}
            for run, found in zip(runs, figures)
        ],
    }
    write_whole(options.out / "gain.json", json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    metric = next((run.metric for run in runs if run.metric), "")
    write_whole(options.out / "gain.svg", plot(curves(runs), metric=metric, target=options.target))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options; `command` holds the arguments as they were given."""
    parser = tool_parser(__doc__)
    parser.add_argument(
        "config", nargs="*", help=f"yaml files (default {DEFAULT_CONFIG}) and key=value overrides"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of the results; continued when it has some"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--vary", action="append", default=[], metavar="KEY=V1,V2,…", help="repeatable: the product"
    )
    parser.add_argument(
        "--algorithms", nargs="+", default=[], metavar="NAME", help=f"files in {ALGORITHMS}"
    )
    parser.add_argument(
        "--parallel", type=int, default=1, metavar="N", help="runs at a time (default 1)"
    )
    parser.add_argument(
        "--target",
        type=float,
        default=0.8,
        help="score whose steps and seconds are told (default 0.8)",
    )
    parser.add_argument(
        "--metric",
        default="",
        help="what is compared (default eval/shapes_strict, else the first score)",
    )
    # Taken out first: --seeds would ask that they be integers.
    overrides: list[str] = []
    rest: list[str] = []
    for before, each in zip(["", *argv], argv):
        is_free = is_override(each) and before not in ("--vary", "--out")
        (overrides if is_free else rest).append(each)
    options = parser.parse_intermixed_args(rest)
    options.config += overrides
    if options.parallel < 1:
        parser.error(f"--parallel {options.parallel} < 1; give the number of runs at a time")
    options.command = list(argv)
    return options


def main(argv: list[str]) -> int:
    """Return the exit code; see the module's text."""
    options = parse(argv)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr
    )
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _on_signal)
    try:
        jobs = jobs_of(options)
        on_cpu = load_config([*jobs[0].arguments, "run.name=any"]).run.device == "cpu"
        with locked(options.out) as lock:
            runs = run_all(jobs, options, [] if on_cpu else visible_gpus(), lock=lock)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; the same command continues\n")
        return 130
    sys.stdout.write(table(runs, target=options.target))
    sys.stdout.write(f"\n{options.out / 'gain.json'}\n{options.out / 'gain.svg'}\n")
    return int(any(run.exit_code for run in runs))


def _on_signal(number: int, _: object) -> None:
    raise SystemExit(128 + number)  # unwinds through run_all, which stops what is on


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
