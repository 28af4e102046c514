"""megadiff stacks RUN: what every rank and replica of a live run is doing, for a run that hangs.

It prints the Python stack of every thread of the processes on this host. The run goes on. For
processes of other hosts it prints the command to run there.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from megadiff.process.stacks import FOLDER, WAIT_S, Announcement, announcements, ask, process_state

STATES = {
    "D": "the kernel waits for a device or a filesystem",
    "T": "it is stopped; kill -CONT lets it go on",
    "R": "it computes",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 when every process answered, 1 when one did not, 2 for no live run."""
    options = _parser().parse_args(argv)
    folder = options.run / FOLDER
    processes = announcements(folder)
    here = [row for row in processes if row.is_here]
    elsewhere = [row for row in processes if not row.is_here]
    if not processes:
        sys.stderr.write(
            f"error: no process of {options.run} is alive on this host; give the folder of a live "
            "run, runs/<name>, on a host where it runs\n"
        )
        return 2

    stacks = ask(folder, here, wait_s=options.wait_s)
    for row in here:
        title = f"{row.name} (pid {row.pid})"
        sys.stdout.write(f"=== {title}\n{_shown(row, stacks, options.wait_s)}\n")

    for command, names in _commands(elsewhere, options.run).items():
        sys.stdout.write(f"=== {', '.join(names)}: on another host, or ended there; try\n")
        sys.stdout.write(f"  {command}\n")
    return 0 if all(stacks.get(row.pid) for row in here) else 1


def _shown(row: Announcement, stacks: dict[int, str], wait_s: float) -> str:
    if row.pid not in stacks:
        return "has just ended\n"
    if stacks[row.pid]:
        return stacks[row.pid]
    state = process_state(row.pid)
    meaning = f": {STATES[state]}" if state in STATES else ""
    return f"no answer within {wait_s:g} s; state {state or 'unknown'}{meaning}\n"


def _commands(elsewhere: Sequence[Announcement], run: Path) -> dict[str, list[str]]:
    """Return the command for each other host → the processes that are there."""
    commands: dict[str, list[str]] = {}
    # whole: .venv is on no PATH of a login without a terminal
    program = [sys.executable, "-m", "megadiff.cli.main", "stacks", str(run.absolute())]
    asked = shlex.join(program)
    for row in elsewhere:
        # ssh joins its words, and the shell there takes them apart again
        command = f"ssh {row.host} {shlex.quote(asked)}"
        if row.job:
            command = f"srun --jobid {row.job} --overlap -w {row.host} -n 1 {asked}"
        commands.setdefault(command, []).append(row.name)
    return commands


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megadiff stacks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder, runs/<name>")
    parser.add_argument(
        "--wait-s", type=float, default=WAIT_S, help="seconds to wait for all answers"
    )
    return parser
