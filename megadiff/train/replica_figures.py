"""Say how busy and how fast each replica was while a step's samples were drawn.

A replica's engine makes one call at a time. Each answer tells how long its call was with the
replica, and for how much of that it waited behind calls of any rank.

A draw ends with its slowest replica. So one slow replica of hundreds sets the pace of all, while it
moves no mean.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from statistics import fmean, median

from megadiff.rollout.client.call_queue import ReplicaCall
from megadiff.rollout.client.report import Report
from megadiff.types import Figures, JsonObject

IDLE_SHARE = "perf/replica_idle_share"
QUEUE_S = "perf/replica_queue_s"
SLOWEST_RATIO = "perf/replica_slowest_ratio"
# More would crowd a page and a tracker; the means are of all.
MOST_NAMED = 32
LEAST_COMPARED = 3  # replicas; of two nobody can say which is the odd one
SLOW_RATIO = 1.5  # times the median's seconds a sample
SLOW_STEPS = 3  # in a row: a single step may have had the smaller call, or a busy network

logger = logging.getLogger(__name__)
# Replica → its calls, each [seconds, of which it waited, samples].
Calls = dict[str, list[Sequence[float]]]


def draw_work(
    calls: Iterable[ReplicaCall], *, names: Iterable[str] = (), drawing_s: float
) -> JsonObject:
    """Return what one rank knows of a draw: `seconds` it took, and `calls` of each replica.

    names: of replicas that are named even where this rank has not called them, since no other rank
    can say that they were idle.
    """
    by_replica: Calls = {name: [] for name in names}

    for call in calls:
        if call.replica:
            row = [call.engine_s, call.queue_s, call.num_samples]
            by_replica.setdefault(call.replica, []).append(row)
    return {"seconds": drawing_s, "calls": by_replica}


def calls_of_all(work_of_ranks: Iterable[JsonObject | None], *, names: Iterable[str] = ()) -> Calls:
    """Join the calls of all ranks.

    work_of_ranks: draw_work() of each, None for one that asked no replica. names: of further
    replicas that could have drawn.
    """
    calls: Calls = {name: [] for name in names}

    for work in work_of_ranks:
        if work is not None:
            for name, of_replica in work["calls"].items():
                calls.setdefault(name, []).extend(of_replica)
    return calls


def replica_figures(calls: Calls, *, drawing_s: float) -> Figures:
    """Return replicas' idle share, how long a call waited, and how slow the slowest one is.

    {} where nobody drew anything.
    drawing_s: until the slowest rank had its samples, of which idle shares are.
    """
    if not drawing_s or not any(calls.values()):
        return {}

    idle: dict[str, float] = {}
    waits: dict[str, float] = {}

    for name, of_replica in calls.items():
        busy_s = sum(seconds - queue_s for seconds, queue_s, _ in of_replica)
        # Beyond 1 where a call was made for nothing, and again elsewhere.
        idle[name] = max(0.0, 1 - busy_s / drawing_s)
        if of_replica:
            waits[name] = fmean(queue_s for _, queue_s, _ in of_replica)

    figures = {IDLE_SHARE: fmean(idle.values()), QUEUE_S: fmean(waits.values())}
    rates_s = seconds_per_sample(calls)
    if len(rates_s) >= LEAST_COMPARED:
        figures[SLOWEST_RATIO] = max(rates_s.values()) / median(rates_s.values())
    if 1 < len(calls) <= MOST_NAMED:
        figures |= {f"{IDLE_SHARE}/{key_name(name)}": idle[name] for name in idle}
        figures |= {f"{QUEUE_S}/{key_name(name)}": wait_s for name, wait_s in waits.items()}
    return figures


def seconds_per_sample(calls: Calls) -> dict[str, float]:
    """Return how long each replica that drew took for a sample; waiting does not count."""
    rates_s: dict[str, float] = {}

    for name, of_replica in calls.items():
        busy_s = sum(seconds - queue_s for seconds, queue_s, _ in of_replica)
        num_samples = sum(count for _, _, count in of_replica)
        # A call of no time is a stub's, and would divide by zero.
        if num_samples and busy_s > 0:
            rates_s[name] = busy_s / num_samples
    return rates_s


class SlowReplicas:
    """Report replicas that stay slow, each of them once until it has recovered.

    report: takes the event replica_slow.
    """

    def __init__(self, report: Report) -> None:
        self._report = report
        self._slow_steps: dict[str, int] = {}  # replica → steps in a row in which it was slow

    def note(self, calls: Calls) -> None:
        """Compare the replicas of a finished draw. calls: of all ranks, with idle replicas."""
        # Those that have left and come back begin anew. One that was idle has shown nothing.
        slow_steps = {name: count for name, count in self._slow_steps.items() if name in calls}
        self._slow_steps = slow_steps
        rates_s = seconds_per_sample(calls)
        if len(rates_s) < LEAST_COMPARED:
            return

        usual_s = median(rates_s.values())
        for name, rate_s in rates_s.items():
            if rate_s <= SLOW_RATIO * usual_s:
                slow_steps.pop(name, None)
                continue
            slow_steps[name] = slow_steps.get(name, 0) + 1
            if slow_steps[name] == SLOW_STEPS:
                self._tell(name, rate_s, usual_s, count=len(rates_s))

    def _tell(self, name: str, rate_s: float, usual_s: float, *, count: int) -> None:
        text = (
            f"{rate_s:.3g} s a sample, the median of {count} replicas is {usual_s:.3g} s; more "
            f"than {SLOW_RATIO:g} times that in {SLOW_STEPS} steps in a row"
        )
        self._report("replica_slow", replica=name, text=text)
        logger.warning(
            "%s is slow: %s. Every draw waits for it: look at its GPU's clock, temperature and "
            "other processes, or start it elsewhere",
            name,
            text,
        )


def key_name(replica: str) -> str:
    """Return a replica's name as a part of a metric's key: of letters, digits and underscores."""
    return re.sub(r"[^A-Za-z0-9_]", "_", replica)
