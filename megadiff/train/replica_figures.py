"""Say how busy each replica was while a step's samples were drawn, and how long calls waited there.

A replica's engine makes one call at a time. Each answer tells how long its call was with the
replica, and for how much of that it waited behind calls of any rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from statistics import fmean

from megadiff.rollout.client.call_queue import ReplicaCall
from megadiff.types import Figures, JsonObject

IDLE_SHARE = "perf/replica_idle_share"
QUEUE_S = "perf/replica_queue_s"
# More would crowd a page and a tracker; the means are of all.
MOST_NAMED = 32


def draw_work(
    calls: Iterable[ReplicaCall], *, names: Iterable[str] = (), drawing_s: float
) -> JsonObject:
    """Return what one rank knows of a draw: `seconds` it took, and `calls` of each replica.

    names: of replicas that are named even where this rank has not called them, since no other rank
    can say that they were idle. A call is [seconds, of which it waited].
    """
    by_replica: dict[str, list[list[float]]] = {name: [] for name in names}

    for call in calls:
        if call.replica:
            by_replica.setdefault(call.replica, []).append([call.engine_s, call.queue_s])
    return {"seconds": drawing_s, "calls": by_replica}


def replica_figures(
    work_of_ranks: Iterable[JsonObject | None], *, names: Iterable[str] = ()
) -> Figures:
    """Return the idle share of each replica, and the mean seconds that a call waited.

    Idle: of the time until the slowest rank had its samples. {} where nobody drew anything.
    work_of_ranks: draw_work() of all ranks, None for one that asked no replica. names: of further
    replicas that could have drawn.
    """
    rows = [work for work in work_of_ranks if work is not None]
    drawing_s = max((row["seconds"] for row in rows), default=0.0)
    calls: dict[str, list[Sequence[float]]] = {name: [] for name in names}

    for row in rows:
        for name, of_replica in row["calls"].items():
            calls.setdefault(name, []).extend(of_replica)
    if not drawing_s or not any(calls.values()):
        return {}

    idle: dict[str, float] = {}
    waits: dict[str, float] = {}

    for name, of_replica in calls.items():
        busy_s = sum(seconds - queue_s for seconds, queue_s in of_replica)
        # Beyond 1 where a call was made for nothing, and again elsewhere.
        idle[name] = max(0.0, 1 - busy_s / drawing_s)
        if of_replica:
            waits[name] = fmean(queue_s for _, queue_s in of_replica)

    figures = {IDLE_SHARE: fmean(idle.values()), QUEUE_S: fmean(waits.values())}
    if 1 < len(calls) <= MOST_NAMED:
        figures |= {f"{IDLE_SHARE}/{key_name(name)}": idle[name] for name in idle}
        figures |= {f"{QUEUE_S}/{key_name(name)}": wait_s for name, wait_s in waits.items()}
    return figures


def key_name(replica: str) -> str:
    """Return a replica's name as a part of a metric's key: of letters, digits and underscores."""
    return re.sub(r"[^A-Za-z0-9_]", "_", replica)
