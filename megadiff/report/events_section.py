"""Show what happened to a run: a table of how often and at what cost, and the newest events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megadiff.observe.events import Event
from megadiff.observe.metrics import format_seconds

# A run's own begin and end is no trouble: by themselves such events make no section.
ORDINARY = {"run_started", "run_finished"}
MAX_ROWS = 200  # a run of a month may have thousands


def events_parts(events: Sequence[Event]) -> dict[str, Any]:
    """Return the section's parts, {} for a run to which nothing happened."""
    if all(event.kind in ORDINARY for event in events):
        return {}

    note = ""
    if len(events) > MAX_ROWS:
        note = f"The newest {MAX_ROWS} of {len(events)} events; all are in events.jsonl."
    return {"table": _totals(events), "log": _log(events[-MAX_ROWS:]), "note": note}


def resume_changes(events: Sequence[Event]) -> str:
    """Return at which steps a run was resumed with other settings, and with which; "" for none."""
    resumes = [event for event in events if event.kind == "run_resumed" and event.text]
    return "; ".join(f"at step {event.step} {event.text}" for event in resumes)


def _totals(events: Sequence[Event]) -> list[list[str]]:
    """Return the head and a row for each kind and replica, in the order of their first event."""
    groups: dict[tuple[str, str], list[Event]] = {}
    for event in events:
        if event.kind not in ORDINARY:
            groups.setdefault((event.words, event.replica), []).append(event)

    table = [["event", "replica", "times", "time lost", "steps"]]
    for (words, replica), group in groups.items():
        lost = _seconds(sum(event.lost_s for event in group))
        steps = [event.step for event in group]
        first = min(steps)
        last = max(steps)
        span = str(first) if first == last else f"{first} … {last}"
        table.append([words, replica, str(len(group)), lost, span])

    total = _seconds(sum(event.lost_s for event in events))
    table.append(["in all", "", "", total, ""])
    return table


def _log(events: Sequence[Event]) -> list[list[str]]:
    table = [["time", "step", "event", "replica", "time lost", ""]]
    for event in events:
        time = event.time.strftime("%Y-%m-%d %H:%M:%S")
        lost = _seconds(event.lost_s)
        table.append([time, str(event.step), event.words, event.replica, lost, event.text])
    return table


def _seconds(seconds: float) -> str:
    return format_seconds(seconds) if seconds else ""
