"""Write and read what happened to a run and its replicas: events.jsonl in the run's folder.

One JSON object a line, in this order: time (ISO 8601, UTC), step, event, and of replica, lost_s and
text those that it has. Nothing is removed: a resumed run goes on in the same file.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megadiff.observe.text_files import parse_line, parse_lines

logger = logging.getLogger(__name__)
EVENTS = "events"  # the first file is events.jsonl
TEXT_CHARS = 2000  # the end of a log is text enough


# The closed list of events: kind → what happened in words, then the fields that such an event must
# have beside its text. lost_s is how much later the run goes on because of it.
KINDS: Mapping[str, tuple[str, ...]] = {
    "run_started": ("run started",),
    "run_resumed": ("run resumed from a checkpoint",),
    "run_stopped": ("run stopped",),
    "run_finished": ("run finished",),
    "replica_died": ("replica died", "replica"),
    "replica_hung": ("replica hung, and was ended", "replica", "lost_s"),
    "replica_slow": ("replica stays slower than the others", "replica"),
    "replica_restarted": ("replica started again", "replica", "lost_s"),
    "replica_joined": ("replica joined", "replica"),
    "replica_left": ("replica left", "replica"),
    "replica_refused": ("replica refused", "replica"),
    "call_retried": ("call made again elsewhere", "replica", "lost_s"),
    "push_retried": ("push made again", "lost_s"),
    "waited_for_replicas": ("waited for replicas", "lost_s"),
}


@dataclass(frozen=True, kw_only=True)
class Event:
    """One line of the file. time: in UTC. step: the one that was on, from 1; 0 before the first."""

    time: datetime
    step: int
    kind: str
    replica: str = ""
    lost_s: float = 0.0
    text: str = ""

    @property
    def words(self) -> str:
        """Return what happened in words; a kind that this version does not know by its name."""
        return KINDS[self.kind][0] if self.kind in KINDS else self.kind.replace("_", " ")


class Events:
    """Append events to the run's folder, from any thread of any rank; a failure only warns, once.

    folder: None writes nowhere. node: whose ranks share a file, as appending is atomic within a
    host, but not over NFS. step: of events that do not say theirs; the loop sets it.
    """

    def __init__(self, folder: Path | None, *, node: int = 0) -> None:
        self.step = 0
        self._path = folder / _file_name(node) if folder is not None else None
        self._has_warned = False

    def write(
        self,
        kind: str,
        *,
        step: int | None = None,
        replica: str = "",
        lost_s: float | None = None,
        text: str = "",
    ) -> None:
        """Append one event. kind: of KINDS, which says what it must have."""
        _, *needed = KINDS[kind]
        given = {"replica": replica, "lost_s": lost_s}
        lacking = [name for name in needed if given[name] in ("", None)]
        assert not lacking, f"event {kind} needs {', '.join(lacking)}"

        row: dict[str, Any] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "step": self.step if step is None else step,
            "event": kind,
        }
        if replica:
            row["replica"] = replica
        if lost_s is not None:
            row["lost_s"] = round(lost_s, 3)
        if text:
            row["text"] = text[:TEXT_CHARS]
        if self._path is not None:
            self._append(self._path, json.dumps(row, ensure_ascii=False).encode() + b"\n")

    def _append(self, path: Path, line: bytes) -> None:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                size = os.fstat(descriptor).st_size
                # A killed run, or a disk that was full, may have left half a line.
                if size and os.pread(descriptor, 1, size - 1) != b"\n":
                    line = b"\n" + line
                # in one call, so that lines of other threads and ranks stay whole
                num_written = os.write(descriptor, line)
                if num_written < len(line):
                    raise OSError(f"{num_written} of {len(line)} bytes were written")
            finally:
                os.close(descriptor)
        except OSError as error:  # such as a full disk: the run itself can go on
            if not self._has_warned:
                logger.warning("%s: %s; events may be missing there from now on", path, error)
            self._has_warned = True


def read_events(run_folder: Path) -> list[Event]:
    """Return the events of all nodes' files by time; warns of lines that are none."""
    events: list[Event] = []
    for path in sorted(run_folder.glob(f"{EVENTS}*.jsonl")):
        events += parse_lines(path, parse_event)
    return sorted(events, key=lambda event: event.time)


def parse_event(line: str) -> Event | None:
    """Return a line's event; None for a torn line, and for one that is no event."""
    row = parse_line(line)
    if not isinstance(row, dict):
        return None
    try:
        time = datetime.fromisoformat(row["time"])
        event = Event(
            # A file that somebody edited may lack the zone, which would break the sorting.
            time=time if time.tzinfo else time.replace(tzinfo=UTC),
            step=int(row["step"]),
            kind=str(row["event"]),
            replica=str(row.get("replica", "")),
            lost_s=float(row.get("lost_s", 0.0)),
            text=str(row.get("text", "")),
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return event if math.isfinite(event.lost_s) else None


def _file_name(node: int) -> str:
    return f"{EVENTS}_node_{node}.jsonl" if node else f"{EVENTS}.jsonl"
