"""Kill a small run again and again, at random, and count what is lost, left over or hangs.

    python tools/kill_storm.py --count 200 --seed 0

Each trial starts a trainer (alone, under torchrun with two ranks, or with a replica of its own),
waits a random time, and sends SIGTERM, SIGINT or SIGKILL to a random rank, torchrun, its process
group, or a replica. Trials go on with the run of the trial before, so each resumes what another
left.

Counted: finished steps that no checkpoint has, although the weights were whole (no rank of several,
nor the only one, was killed by SIGKILL); processes that are left, found by a mark in their
environment, whatever they call themselves; ends that took more than --limit-s after the signal;
gaps in the metrics. Exit code 0 when all four are 0. All traffic is on loopback.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
from forked import Forked
from marked import ROOT, kill_left, python_path

MARK = "MEGADIFF_KILL_STORM"
LEFT_S = 5.0  # for replicas to end with their run
ABSENT_S = 8.0  # a run without replicas waits so long; the storm has just killed the only one
CONFIG = """
run: {device: cpu}
model: {dtype: float32}
train: {num_steps: 1000000, prompts_per_step: 4, updates_per_step: 2, microbatch_size: 4}
algorithm: {group_size: 4, clip_range: 1e-4}
rollout: {height: 64, width: 64, num_inference_steps: 6, sde_window_range: [0, 4], num_replicas: 1,
  max_restarts: 0}
engine: {dtype: float32}
optim: {lr: 1e-5}
parallel: {dp: 0}
parity: {mode: warn}
reward: {color: {type: color}}
checkpoint: {every: 7}
track: []
sample_every: 0
"""
# (way to start, victim, weight in the draw)
SCENES = (
    ("alone", "rank", 9),
    ("alone", "replica", 2),
    ("torchrun", "rank", 3),
    ("torchrun", "torchrun", 3),
    ("torchrun", "group", 1),
    ("colocated", "rank", 1),
    ("colocated", "replica", 1),
)
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)


@dataclass(frozen=True)
class Trial:
    """What is done to which run."""

    start: str
    victim: str
    number: signal.Signals
    rows: int  # of this attempt, before the signal; -1: while it starts
    delay_s: float

    @property
    def kills_weights(self) -> bool:
        """Say whether a rank goes with its part of the weights, and nobody can save it."""
        return self.number == signal.SIGKILL and self.victim == "rank"


def draw(random_source: random.Random) -> Trial:
    scenes = [scene[:2] for scene in SCENES]
    weights = [scene[2] for scene in SCENES]
    start, victim = random_source.choices(scenes, weights)[0]
    return Trial(
        start=start,
        victim=victim,
        number=random_source.choice(SIGNALS),
        rows=random_source.choice((-1, 1, 2, 2, 3, 4)),
        delay_s=random_source.uniform(0.0, 1.5),
    )


def train(arguments: list[str]) -> int:
    from megadiff.cli.console import leave, show_crashes
    from megadiff.cli.train import main

    show_crashes()
    leave(main(arguments))


def torchrun(arguments: list[str]) -> int:
    """Start ranks as torchrun does; they are processes of their own, with their own imports."""
    from torch.distributed.run import main

    main(arguments)
    return 0


class Storm:
    """One run folder, one replica that serves the trials without a replica of their own."""

    def __init__(self, folder: Path, model: Path, limit_s: float) -> None:
        self.folder = folder
        self.model = model
        self.limit_s = limit_s
        self.registry = folder / "registry"
        self.run = folder / "run"
        (folder / "storm.yaml").write_text(CONFIG)
        self.replica: subprocess.Popen | None = None

    def serve(self) -> None:
        """Start the shared replica where there is none."""
        if self.replica is not None and self.replica.poll() is None:
            return
        shutil.rmtree(self.registry, ignore_errors=True)
        command = [sys.executable, "-m", "megadiff.cli.serve", str(self.model)]
        command += ["--dtype=float32", "--port=0", f"--registry={self.registry}"]
        command += [f"--parent-pid={os.getpid()}"]
        # Not marked: it outlives the trials.
        environment = {key: os.environ[key] for key in os.environ if key != MARK}
        with (self.folder / "replica.log").open("wb") as log:
            self.replica = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        wait_until(lambda: list(self.registry.glob("*.json")), 240, "the replica does not start")

    def trainer(self, start: str, log: Path) -> Forked:
        """Start the run's next attempt, in a process group of its own as a shell does."""
        arguments = [
            str(self.folder / "storm.yaml"),
            f"run.dir={self.folder}",
            "run.name=run",
            f"model.path={self.model}",
            f"data.prompts={ROOT / 'assets/prompts/colors.txt'}",
        ]
        if start != "colocated":
            arguments += ["rollout.mode=separate", f"rollout.registry={self.registry}"]
            arguments += [f"rollout.start_timeout_s={ABSENT_S}"]
        if start != "torchrun":
            return Forked(partial(train, arguments), log)
        launcher = ["--standalone", "--nproc-per-node", "2", "-m", "megadiff.cli.train"]
        return Forked(partial(torchrun, [*launcher, *arguments]), log)

    def config_time(self) -> int:
        """Return when the attempt wrote its config, which is when it begins to record."""
        path = self.run / "config.yaml"
        return path.stat().st_mtime_ns if path.exists() else 0

    def num_rows(self) -> int:
        path = self.run / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    def steps(self) -> list[int]:
        """Return the steps of the metrics' rows."""
        path = self.run / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line)["step"] for line in lines]

    def saved_step(self) -> int:
        folders = (self.run / "checkpoints").glob("step_*")
        return max((int(folder.name.removeprefix("step_")) for folder in folders), default=0)


def wait_until(condition, timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} within {timeout_s:.0f} s")
        time.sleep(0.05)


def rank_pids(process: Forked) -> list[int]:
    """Return the launcher and, under torchrun, its ranks."""
    children = psutil.Process(process.pid).children(recursive=True)
    ranks = [child.pid for child in children if is_rank(" ".join(child.cmdline()))]
    return [process.pid, *ranks]


def is_rank(command: str) -> bool:
    # once it has read its config its title stands there
    return "megadiff.cli.train" in command or ": rank " in command


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def is_leader(pid: int) -> bool:
    try:
        return os.getpgid(pid) == pid
    except ProcessLookupError:
        return False


def victim_pid(trial: Trial, storm: Storm, process: Forked, source: random.Random) -> int:
    """Return whom the signal goes to; minus a process group for all of it."""
    children = psutil.Process(process.pid).children(recursive=True)
    ranks = [pid for pid in rank_pids(process) if pid != process.pid]
    # A replica leads a process group of its own; it renames itself, so its command says nothing.
    replicas = [child.pid for child in children if is_leader(child.pid)]
    if trial.victim == "group":
        return -process.pid
    if trial.victim == "replica":
        if trial.start != "colocated":
            return storm.replica.pid
        return replicas[0] if replicas else process.pid
    if trial.victim == "rank" and trial.start == "torchrun":
        return source.choice(ranks) if ranks else process.pid
    return process.pid


def run_trial(storm: Storm, trial: Trial, number: int, source: random.Random) -> dict[str, object]:
    """Return what came of one trial."""
    storm.serve()
    log = storm.folder / f"trial_{number:03d}.log"
    goal = storm.saved_step() + trial.rows
    config_before = storm.config_time()
    steps_before = storm.steps()
    process = storm.trainer(trial.start, log)
    began = time.monotonic()
    if trial.rows >= 0:
        # Rows that the attempt before wrote and did not save are dropped when this one begins.
        wait_until(
            lambda: storm.config_time() != config_before or process.poll() is not None,
            240,
            f"no run, see {log}",
        )
        time.sleep(0.2)
        wait_until(
            lambda: storm.num_rows() >= goal or process.poll() is not None,
            240,
            f"no rows, see {log}",
        )
        time.sleep(trial.delay_s)
    else:
        # Ranks under torchrun import for seconds; a fork begins to record after about one.
        time.sleep((8 if trial.start == "torchrun" else 4) * trial.delay_s)
    if process.poll() is not None:
        raise RuntimeError(f"the trainer ended by itself, see {log}:\n{log.read_text()[-3000:]}")
    ranks = rank_pids(process)
    target = victim_pid(trial, storm, process, source)
    (os.killpg if target < 0 else os.kill)(abs(target), trial.number)
    signalled = time.monotonic()
    hangs = False
    while process.poll() is None or any(map(is_running, ranks)):
        if time.monotonic() - signalled > storm.limit_s:
            hangs = True
            break
        time.sleep(0.05)
    seconds = time.monotonic() - signalled
    if target == storm.replica.pid:
        # After SIGTERM it takes a second to stop; the next trial must not take it for a live one.
        storm.replica.wait(storm.limit_s)
    # Whoever serves a rank sees by a pidfd that it is gone, and ends with it.
    left = kill_left(MARK, os.environ[MARK], after_s=LEFT_S)
    process.wait()
    steps = storm.steps()
    saved = storm.saved_step()
    finished = max(steps, default=0)
    began_steps = steps != steps_before
    lost = max(0, finished - saved) if began_steps and not trial.kills_weights else 0
    gaps = steps != list(range(1, len(steps) + 1))
    return {
        "lost": lost,
        "left": len(left),
        "hangs": int(hangs),
        "gaps": int(gaps),
        "finished": finished,
        "saved": saved,
        "start_s": signalled - began,
        "end_s": seconds,
        "code": process.returncode or 0,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200, help="trials")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--limit-s", type=float, default=60.0, help="an end that takes longer hangs"
    )
    parser.add_argument("--folder", type=Path, help="keep the run and the logs there")
    options = parser.parse_args(argv)
    # Started in the background it would ignore SIGINT, and so would all that it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if MARK not in os.environ:
        # Only what a process was executed with shows in /proc: forks have this process's mark.
        mark = {MARK: secrets.token_hex(8), "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | mark)
    import torch._dynamo  # noqa: F401
    import torch.distributed.run  # noqa: F401

    import megadiff.cli.train  # noqa: F401  (forks have it)
    import megadiff.engines.veomni  # noqa: F401
    from examples.tiny_models.qwen_image import write_tiny_pipeline
    from megadiff.process.garbage import freeze_startup_objects

    freeze_startup_objects()  # a collection in a fork copies all pages that it walks through
    source = random.Random(options.seed)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="kill-storm-"))
    folder.mkdir(parents=True, exist_ok=True)
    write_tiny_pipeline(folder / "model")
    storm = Storm(folder, folder / "model", options.limit_s)
    totals: Counter[str] = Counter()
    slowest = 0.0
    try:
        for number in range(options.count):
            trial = draw(source)
            result = run_trial(storm, trial, number, source)
            slowest = max(slowest, result["end_s"])
            totals.update({key: result[key] for key in ("lost", "left", "hangs", "gaps")})
            totals["killed"] += trial.kills_weights
            say(
                f"{number:3d} seed {options.seed} {trial.start:9s} {trial.number.name:7s} to "
                f"{trial.victim:8s} code {result['code']:4d} end {result['end_s']:5.1f} s "
                f"finished {result['finished']:3d} saved {result['saved']:3d} "
                f"lost {result['lost']} left {result['left']} hangs {result['hangs']}"
            )
    finally:
        if storm.replica is not None:
            storm.replica.terminate()
            storm.replica.wait(20)
        kill_left(MARK, os.environ[MARK], after_s=0)  # of a trial that Ctrl-C broke off
    say(
        f"{options.count} trials, seed {options.seed}: {totals['lost']} finished steps lost where "
        f"weights were whole ({totals['killed']} trials killed a rank's), "
        f"{totals['left']} processes left, {totals['hangs']} ends over {options.limit_s:.0f} s, "
        f"{totals['gaps']} gaps in the metrics; slowest end {slowest:.1f} s"
    )
    if options.folder is None:
        shutil.rmtree(folder, ignore_errors=True)
    return int(any(totals[key] for key in ("lost", "left", "hangs", "gaps")))


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
