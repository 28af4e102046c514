"""Break the replicas of a run at random, and compare its figures with an undisturbed run's.

    python tools/bench_faults.py --faults 100 --seed 0 [--replicas 4] [--model assets/shapes]

Two runs of `megadiff train` from one config: one is left alone, and in the other a random replica
has a fault at a random moment, --faults times over all steps. A fault is one of

    SIGKILL, SIGSTOP, SIGTERM   of the replica and its workers
    drop                        all of its connections are broken (`ss -K`, which wants root)
    late                        it answers nothing for 1 to 5 s, less than rollout.heartbeat_s

Counted: steps whose figures differ (time, perf and memory aside), steps that are missing, processes
that are left. Prints the faults and the events by kind, and the seconds of both runs. Exit code 0
when all three are 0. Seeds are printed; all traffic is on loopback.
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
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil
from bench_machine import tool_parser
from marked import ROOT, kill_left, python_path

from megadiff.observe.metrics import parse_row
from megadiff.observe.text_files import parse_lines

MARK = "MEGADIFF_BENCH_FAULTS"
ASIDE = ("time/", "perf/", "memory/", "rollout/replicas")
DROP = "drop"
LATE = "late"
KINDS = ("SIGKILL", "SIGSTOP", "SIGTERM", DROP, LATE)
LATE_S = (1.0, 5.0)  # below the config's heartbeat_s
LEFT_S = 8.0  # for replicas to end with their run
CONFIG = """
model: {{path: {model}, dtype: float32}}
data: {{prompts: {root}/assets/prompts/colors.txt}}
train: {{num_steps: {steps}, prompts_per_step: {prompts}, updates_per_step: 2, microbatch_size: 16}}
algorithm: {{group_size: 8, clip_range: 1e-4}}
rollout:
  height: 64
  width: 64
  num_inference_steps: 6
  sde_window_range: [0, 4]
  batch_size: 8
  num_replicas: {replicas}
  heartbeat_s: 8
  max_restarts: 30
engine: {{dtype: float32}}
optim: {{lr: 1e-5}}
reward: {{color: {{type: color}}}}
checkpoint: {{every: 0}}
track: []
sample_every: 0
"""


def main(argv: list[str]) -> int:
    parser = tool_parser(__doc__)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument(
        "--steps", type=int, default=0, help="default: half of --faults, at least 3"
    )
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--model", type=Path, default=ROOT / "assets" / "shapes")
    parser.add_argument("--limit-s", type=float, default=3000.0, help="of one run")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("overrides", nargs="*", help="key=value of the config")
    options = parser.parse_args(argv)
    options.steps = options.steps or max(3, options.faults // 2)
    if DROP in options.kinds and (os.geteuid() or not shutil.which("ss")):
        print("no connection is dropped: that wants root and the program ss (iproute2)")
        options.kinds.remove(DROP)

    with tempfile.TemporaryDirectory(prefix="megadiff-faults-") as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        config = folder / "faults.yaml"
        text = CONFIG.format(
            model=options.model.resolve(),
            root=ROOT,
            steps=options.steps,
            prompts=4 * options.replicas,
            replicas=options.replicas,
        )
        config.write_text(text)

        print(
            f"{options.faults} faults over {options.steps} steps, seed {options.seed}", flush=True
        )
        calm_s, calm, _ = run(config, folder, "calm", options, faults=0)
        disturbed_s, disturbed, num_left = run(
            config, folder, "disturbed", options, faults=options.faults
        )

    unlike = [
        step for step, row in enumerate(calm) if step >= len(disturbed) or disturbed[step] != row
    ]
    missing = len(calm) - len(disturbed)
    print(
        f"{options.faults} faults: {len(unlike)} of {len(calm)} steps differ"
        f"{f', the first is {unlike[0] + 1}' if unlike else ''}; {missing} steps missing; "
        f"{num_left} processes left; {calm_s:.0f} s undisturbed, {disturbed_s:.0f} s disturbed"
    )
    if unlike and unlike[0] < len(disturbed):
        for key, value in calm[unlike[0]].items():
            if disturbed[unlike[0]].get(key) != value:
                print(f"  {key}: {value} and {disturbed[unlike[0]].get(key)}")
    return int(bool(unlike or missing or num_left))


def run(
    config: Path, folder: Path, name: str, options: argparse.Namespace, *, faults: int
) -> tuple[float, list[dict], int]:
    """Return the seconds, the rows that are compared, and the number of processes left."""
    mark = secrets.token_hex(8)
    command = [sys.executable, "-m", "megadiff.cli.main", "train", str(config)]
    command += [f"run.dir={folder}", f"run.name={name}", *options.overrides]
    environment = os.environ | {MARK: mark, "PYTHONPATH": python_path()}
    log = folder / f"{name}.log"

    began_s = time.monotonic()
    with log.open("wb") as stream:
        process = subprocess.Popen(command, env=environment, stdout=stream, stderr=stream)
    metrics = folder / name / "metrics.jsonl"
    break_replicas(process, metrics, faults, options)
    try:
        code = process.wait(max(1.0, began_s + options.limit_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        code = "none: it was not done in time"
    seconds = time.monotonic() - began_s
    if code != 0:
        print(f"{name}: exit code {code}\n{log.read_text(errors='replace')[-4000:]}")

    show_events(folder / name / "events.jsonl", name)
    left = kill_left(MARK, mark, after_s=LEFT_S)
    for process in left:
        print(f"  left: {process}")
    return seconds, rows_of(metrics), len(left)


def break_replicas(
    process: subprocess.Popen, metrics: Path, faults: int, options: argparse.Namespace
) -> None:
    """Do random faults to random replicas, spread over the run's steps."""
    rng = random.Random(options.seed)
    # none before the first step: a replica that never served tells of a mistake
    moments = sorted(1 + (options.steps - 1) * rng.random() for _ in range(faults))
    deadline_s = time.monotonic() + options.limit_s
    done: Counter[str] = Counter()
    for moment in moments:
        while process.poll() is None and len(rows_of(metrics)) < int(moment):
            if time.monotonic() > deadline_s:
                return
            time.sleep(0.02)
        time.sleep(rng.random())
        servers = replicas_of(process.pid)
        if process.poll() is not None or not servers:
            continue
        kind = rng.choice(options.kinds)
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            do_fault(kind, rng.choice(servers), seconds=rng.uniform(*LATE_S))
            done[kind] += 1
    if done:
        print(
            f"faults done: {', '.join(f'{kind} {count}' for kind, count in sorted(done.items()))}"
        )


def do_fault(kind: str, server: psutil.Process, *, seconds: float) -> None:
    """Do a fault of KINDS to a replica. seconds: of a late one."""
    if kind == DROP:
        drop_connections(server)
    elif kind == LATE:
        os.killpg(server.pid, signal.SIGSTOP)
        threading.Timer(seconds, wake, [server]).start()
    else:
        os.killpg(server.pid, signal.Signals[kind])


def wake(server: psutil.Process) -> None:
    # is_running(): another process may have the number by then
    with suppress(ProcessLookupError):
        if server.is_running():
            os.killpg(server.pid, signal.SIGCONT)


def drop_connections(server: psutil.Process) -> None:
    """Break what is connected to the ports that a server listens on."""
    connections = server.net_connections(kind="tcp")
    ports = {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}
    for port in ports:
        command = ["ss", "-K", "state", "established", "sport", "=", str(port)]
        subprocess.run(command, check=True, capture_output=True)


def replicas_of(pid: int) -> list[psutil.Process]:
    """Return the servers that a trainer started, each the leader of its own process group."""
    try:
        children = psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        return []
    leaders = []
    for child in children:
        try:
            if os.getpgid(child.pid) == child.pid:
                leaders.append(child)
        except ProcessLookupError:
            pass
    return sorted(leaders, key=lambda child: child.pid)


def rows_of(metrics: Path) -> list[dict]:
    """Return the figures of each finished line, without what depends on the clock.

    A step that is logged twice has two rows: read_rows() would merge them.
    """
    rows = []
    for row in parse_lines(metrics, parse_row) if metrics.exists() else ():
        rows.append({key: value for key, value in row.items() if not key.startswith(ASIDE)})
    return rows


def show_events(file: Path, name: str) -> None:
    if file.is_file():
        kinds = Counter(json.loads(line)["event"] for line in file.read_text().splitlines())
        print(f"{name}: {', '.join(f'{kind} {count}' for kind, count in sorted(kinds.items()))}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
