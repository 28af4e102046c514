"""Say in a table where a traced step's time went: stages, kernels or operators, stalls.

Pure functions of the events of a Chrome trace, as torch's profiler writes it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

STAGE = "stage/"  # how names of ranges begin that are timers
STEP = f"{STAGE}step"
GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
CPU_WORK = ("cpu_op",)
TOP = 20
NAME_CHARS = 100  # templates of CUDA kernels have names of a thousand
US = 1e6  # a second of a trace's clock

TraceEvent = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class StageShare:
    """Hold the seconds of a stage without those of the stages within it.

    busy_s: of these, with a kernel or operator running. stall_s: the longest time without one.
    """

    name: str
    seconds: float
    busy_s: float
    stall_s: float


@dataclass(frozen=True, kw_only=True)
class WorkShare:
    """Hold the time of a kernel, or of an operator without those that it calls."""

    name: str
    count: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class TraceSummary:
    """Hold what a traced step did.

    stages: by falling seconds. work: the TOP of all, of GPU kernels where there are any, else of
    CPU operators; work_s is the sum of all.
    """

    step_s: float
    stages: Sequence[StageShare]
    work: Sequence[WorkShare]
    work_s: float
    on_gpu: bool

    @property
    def explained(self) -> float:
        """Return which share of the step is in a named stage."""
        named_s = sum(stage.seconds for stage in self.stages if STAGE + stage.name != STEP)
        return named_s / self.step_s if self.step_s else 0.0


def summarise(events: Sequence[TraceEvent]) -> TraceSummary:
    """Return the table of a trace's events. Raises ValueError where no step is in them."""
    whole = [event for event in events if event.get("ph") == "X"]
    steps = [event for event in whole if event["name"] == STEP and _is_range(event)]
    if not steps:
        raise ValueError(f"the trace has no range {STEP}; trace with observe.profile_steps")
    step = steps[0]

    marks = []
    for event in whole:
        is_of_step = event["tid"] == step["tid"] and step["ts"] <= event["ts"] <= _end(step)
        if is_of_step and _is_range(event):
            marks.append(event)

    gpu = [event for event in whole if event.get("cat") in GPU_WORK]
    cpu = [event for event in whole if event.get("cat") in CPU_WORK]
    busy = _BusyTime(gpu or cpu)
    rows = _added_up(((event["name"], event["dur"]) for event in gpu) if gpu else _own_times(cpu))

    return TraceSummary(
        step_s=step["dur"] / US,
        stages=_stages(marks, busy),
        work=sorted(rows, key=lambda row: -row.seconds)[:TOP],
        work_s=sum(row.seconds for row in rows),
        on_gpu=bool(gpu),
    )


def to_markdown(summary: TraceSummary, *, title: str) -> str:
    """Return the summary as a page of two tables."""
    kind = "kernel" if summary.on_gpu else "operator"
    work = "kernels of this rank's GPU" if summary.on_gpu else "operators on the CPU"
    lines = [
        f"# {title}",
        "",
        f"{summary.step_s:.3f} s, of which {summary.explained:.1%} is in a named stage. Seconds of "
        "a stage leave out the stages within it.",
        f"*Idle* is time of a stage in which no {kind} of this rank ran; *longest* is the longest "
        "such stall.",
        "In `rollout`, `reward` and `sync` a rank waits for other processes: their work is not in "
        "its trace.",
        "",
        "| stage | s | of the step | idle s | longest ms |",
        "|---|---|---|---|---|",
    ]

    for stage in summary.stages:
        name = "(in no stage)" if STAGE + stage.name == STEP else stage.name
        of_step = stage.seconds / summary.step_s
        idle_s = stage.seconds - stage.busy_s
        numbers = f"{stage.seconds:.3f} | {of_step:.1%} | {idle_s:.3f} | {1e3 * stage.stall_s:.1f}"
        lines.append(f"| {name} | {numbers} |")

    lines += [
        "",
        f"Of {summary.work_s:.3f} s of {work}, by their own time:",
        "",
        f"| {kind} | calls | s | share |",
        "|---|---|---|---|",
    ]

    for row in summary.work:
        of_work = row.seconds / summary.work_s
        lines.append(f"| `{_short(row.name)}` | {row.count} | {row.seconds:.4f} | {of_work:.1%} |")
    return "\n".join(lines) + "\n"


class _BusyTime:
    """The union of events' intervals, in microseconds."""

    def __init__(self, events: Sequence[TraceEvent]) -> None:
        begins_E = np.array([event["ts"] for event in events], dtype=np.float64)
        ends_E = np.array([_end(event) for event in events], dtype=np.float64)
        order_E = np.argsort(begins_E, kind="stable")
        begins_E = begins_E[order_E]
        ends_E = np.maximum.accumulate(ends_E[order_E])  # so far
        # An interval is a new one where all before it have ended.
        is_new_E = np.ones(len(events), dtype=bool)
        is_new_E[1:] = begins_E[1:] > ends_E[:-1]
        self._begins = begins_E[is_new_E]
        is_last_E = np.append(is_new_E[1:], True)[: len(events)]
        self._ends = ends_E[is_last_E]

    def within(self, begin: float, end: float) -> tuple[float, float]:
        """Return how long some event ran between begin and end, and the longest time none did."""
        first = np.searchsorted(self._ends, begin, side="right")
        last = np.searchsorted(self._begins, end, side="left")
        begins = np.clip(self._begins[first:last], begin, end)
        ends = np.clip(self._ends[first:last], begin, end)
        stalls = np.append(begins, end) - np.insert(ends, 0, begin)
        return float((ends - begins).sum()), float(stalls.max())


def _stages(marks: Sequence[TraceEvent], busy: _BusyTime) -> list[StageShare]:
    seconds: dict[str, float] = defaultdict(float)
    busy_s: dict[str, float] = defaultdict(float)
    stall_s: dict[str, float] = defaultdict(float)

    for name, begin, end in _segments(marks):
        busy_us, stall_us = busy.within(begin, end)
        seconds[name] += (end - begin) / US
        busy_s[name] += busy_us / US
        stall_s[name] = max(stall_s[name], stall_us / US)

    rows = [
        StageShare(name=name, seconds=value, busy_s=busy_s[name], stall_s=stall_s[name])
        for name, value in seconds.items()
    ]

    return sorted(rows, key=lambda row: -row.seconds)


def _segments(marks: Sequence[TraceEvent]) -> Iterator[tuple[str, float, float]]:
    """Cut nested ranges into (innermost stage, begin, end), without empty ones."""
    edges = sorted({edge for mark in marks for edge in (mark["ts"], _end(mark))})
    # Of those that begin together the outer one is longer, and comes first.
    waiting = sorted(marks, key=lambda mark: (mark["ts"], -mark["dur"]))
    waiting.reverse()
    stack: list[TraceEvent] = []

    for begin, end in pairwise(edges):
        while stack and _end(stack[-1]) <= begin:
            stack.pop()
        while waiting and waiting[-1]["ts"] <= begin:
            stack.append(waiting.pop())
        while stack and _end(stack[-1]) <= begin:
            stack.pop()
        if stack:
            yield stack[-1]["name"].removeprefix(STAGE), begin, end


def _own_times(operators: Sequence[TraceEvent]) -> list[tuple[str, float]]:
    """Return (name, microseconds) of each operator, without those that it calls."""
    events = sorted(operators, key=lambda event: (event["ts"], -event["dur"]))
    own_us = [event["dur"] for event in events]
    callers_of_thread: dict[Any, list[int]] = defaultdict(list)

    for index, event in enumerate(events):
        callers = callers_of_thread[event["tid"]]
        while callers and _end(events[callers[-1]]) <= event["ts"]:
            callers.pop()
        if callers:
            own_us[callers[-1]] -= event["dur"]
        callers.append(index)

    # Times are rounded, so a sum of called ones may exceed its caller.
    return [(event["name"], max(0.0, us)) for event, us in zip(events, own_us, strict=True)]


def _added_up(times: Iterable[tuple[str, float]]) -> list[WorkShare]:
    seconds: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for name, us in times:
        seconds[name] += us / US
        counts[name] += 1
    return [WorkShare(name=name, count=counts[name], seconds=seconds[name]) for name in seconds]


def _is_range(event: TraceEvent) -> bool:
    # The profiler repeats a range on the GPU's line, as gpu_user_annotation.
    return event.get("cat") == "user_annotation" and event["name"].startswith(STAGE)


def _end(event: TraceEvent) -> float:
    return float(event["ts"] + event["dur"])


def _short(name: str) -> str:
    text = name.replace("|", "¦").replace("`", "'")
    return text if len(text) <= NAME_CHARS else f"{text[:NAME_CHARS]}…"
