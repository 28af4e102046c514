"""A few words between ranks, in files, when collectives may hang and the launcher may be gone.

All files exist from the start and are overwritten in place. Over NFS, opening a known file asks the
server what is in it, while the name of a new one may stay unseen for a minute.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from megadiff.checkpoint.checkpoints import Checkpoints
from megadiff.process.identity import process_home

# closed: it begins no optimizer step. stepped: it has finished its step, if it could.
# settled: it will not step again. saved: it has written its part. done: the ranks may end.
PHASES = ("running", "closed", "stepped", "settled", "saved", "done")
POLL_S = 0.05
# A file server answers all ranks' looks for as long as the run goes on. Above so many ranks those
# of a second are spread over more of them.
LOOKS_PER_S = 64
# The longest pause: ranks have 30 s (rescue.ANSWER_S) to say where they stand, from the first one's
# alarm on.
MOST_PAUSE_S = 7.5
FOLDER = ".ranks-"  # with an attempt's name behind it: a rank left over from another sees its own
ALARM = "alarm.json"
FILE_BYTES = 2048  # written whole at the start: a disk that is full later has room for the words
# of an error or a reason; in ASCII its row then fits into FILE_BYTES
MOST_CHARS = 400


@dataclass(frozen=True, kw_only=True)
class RunAlarm:
    """Why the run ends, '' as long as it goes on. exit_code: 1 for a failure."""

    reason: str = ""
    exit_code: int = 1


@dataclass(frozen=True, kw_only=True)
class RankState:
    """A rank's word about itself.

    phase: one of PHASES. steps: optimizer steps of this attempt. counted_steps: those that were
    done when finished_step, its newest finished step, was counted. saved_step: of the newest
    checkpoint. writing_step: of the one whose part it writes in the background, 0 for none.
    has_failed: its main thread has failed and will not step. error: why it could not write its
    part.
    """

    rank: int
    host: str = ""
    pid: int = 0
    phase: str = "running"
    steps: int = 0
    counted_steps: int = 0
    finished_step: int = 0
    saved_step: int = 0
    writing_step: int = 0
    has_failed: bool = False
    error: str = ""

    def has_come(self, phase: str) -> bool:
        """Say whether it is in the phase or beyond; one that failed goes no further."""
        return bool(self.error) or self.has_reached(phase)

    def has_reached(self, phase: str) -> bool:
        """Say whether it was in the phase, whatever failed later."""
        return PHASES.index(self.phase) >= PHASES.index(phase)

    def is_alive(self) -> bool:
        """Say whether the process runs; one on another host is taken to."""
        if self.host != process_home():
            return True
        try:
            return psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


class Board:
    """The files of one attempt of a run. lay_out() comes first, on one rank, then a barrier."""

    def __init__(self, folder: Path, *, rank: int, world_size: int) -> None:
        self.folder = folder
        self._files = [folder / f"rank_{rank:05d}.json" for rank in range(world_size)]
        self.own_state = RankState(rank=rank, host=process_home(), pid=os.getpid())
        self._was_missing = False  # the folder, at the last look
        # A node's first rank looks each time.
        is_first = os.environ.get("LOCAL_RANK", "0") == "0"
        self._pause_s = 0.0 if is_first else look_pause_s(world_size)
        self._looked_s = -math.inf

    def lay_out(self) -> None:
        """Make all files, empty, and remove those of earlier attempts."""
        for old in self.folder.parent.glob(f"{FOLDER}*"):
            shutil.rmtree(old, ignore_errors=True)
        self.folder.mkdir(parents=True)
        for path in (self.folder / ALARM, *self._files):
            _overwrite(path, {})

    def is_due(self) -> bool:
        """Say whether this rank should look at the alarm and the folder, and count that it does.

        A rank that gets a signal, or fails, needs no look.
        """
        now_s = time.monotonic()
        is_due = now_s - self._looked_s >= self._pause_s
        if is_due:
            self._looked_s = now_s
        return is_due

    def is_gone(self) -> bool:
        """Say whether the folder was missing at this look and at the one before.

        Raises OSError where the filesystem did not answer, which says nothing of the folder.
        """
        was_missing = self._was_missing
        self._was_missing = False
        try:
            self.folder.stat()
        except FileNotFoundError:
            self._was_missing = True
        return was_missing and self._was_missing

    def say(self, **changes: object) -> None:
        """Change this rank's state and show it to the others."""
        self.own_state = replace(self.own_state, **changes)  # type: ignore[arg-type]  # its fields
        _overwrite(self._files[self.own_state.rank], asdict(self.own_state))

    def state(self, rank: int) -> RankState:
        """Read what a rank says; one that is being written counts as running."""
        # a host that is none counts as alive
        return RankState(**(_read(self._files[rank]) or {"rank": rank, "host": "?"}))

    def neighbour_is_gone(self) -> bool:
        """Say whether the rank before or after this one has ended, on this host."""
        # Two files, not all: many ranks ask every second.
        num_ranks = len(self._files)
        ranks = [(self.own_state.rank + step) % num_ranks for step in (-1, 1)]
        return not all(self.state(rank).is_alive() for rank in ranks)

    def raise_alarm(self, reason: str, exit_code: int = 1) -> None:
        """Tell all ranks that the run ends; the first reason stays."""
        if not self.alarm().reason:
            alarm = RunAlarm(reason=reason[:MOST_CHARS], exit_code=exit_code)
            _overwrite(self.folder / ALARM, asdict(alarm))

    def alarm(self) -> RunAlarm:
        return RunAlarm(**_read(self.folder / ALARM))

    def wait_for(
        self, phase: str, *, timeout_s: float, ranks: Sequence[int] | None = None
    ) -> list[RankState]:
        """Return the states of the ranks, by default of all, once each has come or is gone.

        Returns after timeout_s at the latest. The state of a rank that has come is the one that was
        read first: what it says of that phase does not change.
        """
        deadline = time.monotonic() + timeout_s
        num_ranks = len(self._files)
        states = {rank: self.state(rank) for rank in ranks or range(num_ranks)}
        while True:
            waiting = [rank for rank, state in states.items() if not state.has_come(phase)]
            is_late = time.monotonic() > deadline
            if is_late or not any(states[rank].is_alive() for rank in waiting):
                return list(states.values())
            time.sleep(POLL_S * max(1.0, len(waiting) / 8, num_ranks / 64))
            # Only these: all ranks read at the same time, and one slow rank is waited for by all.
            states |= {rank: self.state(rank) for rank in waiting}


def look_pause_s(world_size: int) -> float:
    """Return the seconds between two looks of a rank; 0 where each may look whenever it listens."""
    if world_size <= LOOKS_PER_S:
        return 0.0
    return min(world_size / LOOKS_PER_S, MOST_PAUSE_S)


def disagreement(states: list[RankState]) -> str:
    """Return '' when all ranks stand at one optimizer step of one attempt, else who does not."""
    for state in states:
        if state.error and not state.has_reached("settled"):
            return f"rank {state.rank} could not be saved: {state.error}"
        if not state.has_come("settled") and not state.is_alive():
            gone = f"rank {state.rank} (pid {state.pid} on {state.host.split('/')[0]})"
            return f"{gone} is gone, and its part of the weights with it"
        if not state.has_come("settled"):
            return f"rank {state.rank} does not answer"

    first = states[0]
    for state in states[1:]:
        if state.steps != first.steps:
            return (
                f"rank {first.rank} is at optimizer step {first.steps}, "
                f"rank {state.rank} at {state.steps}: their weights are of two policies"
            )

    return ""


def outcome(checkpoints: Checkpoints, first: RankState, problem: str) -> str:
    """Say in one line what is on disk. first: rank 0's state when it had settled."""
    newest = checkpoints.saved_step
    then = "the same command continues from there"
    if checkpoints.config.checkpoint.resume != "auto":
        then = "set checkpoint.resume=auto to continue from there"

    if problem:
        rest = f"the newest checkpoint is of step {newest}" if newest else "there is no checkpoint"
        return f"nothing was saved, {problem}; {rest}"

    if first.finished_step <= first.saved_step:
        return f"step {newest} is saved; {then}" if newest else "no step was finished"

    is_copy = first.writing_step >= first.finished_step  # made before any further update
    more = 0 if is_copy else first.steps - first.counted_steps
    updates = "1 update" if more == 1 else f"{more} updates"
    beyond = f" (with {updates} of step {first.finished_step + 1}, which is repeated)"
    folder = checkpoints.folder_of(first.finished_step)

    return f"saved {folder}{beyond if more else ''}; {then}"


def _overwrite(path: Path, row: dict[str, object]) -> None:
    """Write in place; a reader that comes in between finds no JSON and asks again."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        os.pwrite(descriptor, json.dumps(row).encode().ljust(FILE_BYTES), 0)
    finally:
        os.close(descriptor)


def _read(path: Path) -> dict[str, Any]:
    try:
        row = json.loads(path.read_bytes())
    except (OSError, ValueError):
        row = None
    return row if isinstance(row, dict) else {}
