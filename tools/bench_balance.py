"""How evenly calls are shared out over replicas of unlike speed, on a clock of the tool's own.

    python tools/bench_balance.py [--replicas 64] [--calls 2 4 8] [--spread 0.5] \\
        [--jitter 0.05] [--seeds 20] [--ranks 8]

Replicas make one call at a time. Their seconds a sample are log-normal with --spread, and a call
takes that times its samples, give or take --jitter. Prints, for each number of calls a replica,
the mean (worst) over the seeds of a step's seconds over the fluid bound:

    whole calls   the least that any schedule of whole calls can take, speeds known
    first step    CallQueue, which knows no speed yet
    later steps   CallQueue, with what it learnt
    fewest calls  each call to the replica with the fewest, at most two there: no speed counts

The fluid bound cuts work to any size: samples over the sum of all speeds. With few calls a replica
no schedule reaches it, as a call is never cut: its composition decides float rounding.

With --ranks as many equally fast replicas are shared by so many ranks, each of which gives out its
own calls: the largest of --calls. --replicas and --spread do not count then. The figures are of
steps after the first: as it is, and as if a rank took the wait behind others' calls for slowness.
"""

from __future__ import annotations

import heapq
import itertools
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from bench_machine import tool_parser

from megadiff.rollout.client.call_queue import CALLS_PER_REPLICA, CallQueue, ReplicaCall

SAMPLES = 8  # of a call
NUM_STEPS = 4
COLUMNS = ("whole calls", "first step", "later steps", "fewest calls")


def make_calls(count: int) -> list[ReplicaCall]:
    return [ReplicaCall(indices=(index,), num_samples=SAMPLES) for index in range(count)]


def fluid_s(rates: Mapping[str, float], num_samples: int) -> float:
    """Return the seconds of perfect balance, with work cut to any size."""
    return num_samples / sum(1 / rate for rate in rates.values())


def whole_calls_s(rates: Mapping[str, float], num_calls: int) -> float:
    """Return the least seconds in which whole calls can be made.

    For calls of one size it is optimal to give each to whom it is done first with.
    """
    heap = [(rate * SAMPLES, rate * SAMPLES) for rate in rates.values()]
    heapq.heapify(heap)
    end_s = 0.0
    for _ in range(num_calls):
        end_s, call_s = heap[0]
        heapq.heapreplace(heap, (end_s + call_s, call_s))
    return end_s


def queue_s(
    queue: CallQueue, rates: Mapping[str, float], *, jitter: float = 0.0, seed: int = 0
) -> float:
    """Return the seconds that replicas of these rates take; each makes one call at a time."""
    rng = random.Random(seed)
    events: list[tuple[float, int, ReplicaCall, str, float]] = []
    free_s = dict.fromkeys(rates, 0.0)
    now_s = 0.0
    number = itertools.count()
    while not queue.is_over:
        while taken := queue.take(now_s):
            call, replica = taken
            seconds = rates[replica] * call.num_samples * rng.lognormvariate(0.0, jitter)
            free_s[replica] = max(now_s, free_s[replica]) + seconds
            heapq.heappush(events, (free_s[replica], next(number), call, replica, seconds))
        now_s, _, call, replica, seconds = heapq.heappop(events)
        queue.succeed(call, replica, seconds=seconds, outstanding=0, now_s=now_s)
    return now_s


def fewest_calls_s(
    rates: Mapping[str, float], num_calls: int, *, jitter: float = 0.0, seed: int = 0
) -> float:
    """Return the seconds where each call goes to the replica that has the fewest.

    CALLS_PER_REPLICA are there at most. So a fast replica gets more, but a slow one keeps its last.
    """
    rng = random.Random(seed)
    loads = dict.fromkeys(rates, 0)
    free_s = dict.fromkeys(rates, 0.0)
    ends: list[tuple[float, str]] = []
    now_s = 0.0
    for _ in range(num_calls):
        if len(ends) == CALLS_PER_REPLICA * len(rates):
            now_s, ended = heapq.heappop(ends)
            loads[ended] -= 1
        replica = min(loads, key=loads.__getitem__)
        loads[replica] += 1
        seconds = rates[replica] * SAMPLES * rng.lognormvariate(0.0, jitter)
        free_s[replica] = max(now_s, free_s[replica]) + seconds
        heapq.heappush(ends, (free_s[replica], replica))
    return max(free_s.values())


def shared_s(
    known: Sequence[dict[str, float]],
    per_rank: int,
    rng: random.Random,
    *,
    counts_waits: bool = False,
    jitter: float = 0.01,
) -> float:
    """Return the seconds of a step of several ranks, which share as many replicas.

    A call takes a second, and messages up to a hundredth. known: of each rank, what it learnt of
    the replicas; kept up to date. counts_waits: a call's seconds are those behind others, too.
    """
    names = [str(index) for index in range(len(known))]
    queues = [
        CallQueue(make_calls(per_rank), names[rank:] + names[:rank], known[rank])
        for rank in range(len(known))
    ]
    # of each replica: rank, call and when it came; the first is drawn
    lines: dict[str, list[tuple[int, ReplicaCall, float]]] = {name: [] for name in names}
    events: list[tuple[float, int, Callable[[], None]]] = []
    number = itertools.count()
    now_s = 0.0

    def after(seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(events, (now_s + seconds, next(number), event))

    def give_out(rank: int) -> None:
        while taken := queues[rank].take(now_s):
            after(0.01 * rng.random(), partial(arrive, rank, *taken))

    def arrive(rank: int, call: ReplicaCall, name: str) -> None:
        lines[name].append((rank, call, now_s))
        if len(lines[name]) == 1:
            begin(name)

    def begin(name: str) -> None:
        after(rng.lognormvariate(0.0, jitter), partial(end, name, now_s))

    def end(name: str, began_s: float) -> None:
        rank, call, came_s = lines[name].pop(0)
        seconds = now_s - (came_s if counts_waits else began_s)
        waiting = SAMPLES * len(lines[name])
        if lines[name]:
            begin(name)
        after(0.01 * rng.random(), partial(answer, rank, call, name, seconds, waiting))

    def answer(rank: int, call: ReplicaCall, name: str, seconds: float, waiting: int) -> None:
        queues[rank].succeed(call, name, seconds=seconds, outstanding=waiting, now_s=now_s)
        give_out(rank)

    for rank in range(len(known)):
        after(0.01 * rng.random(), partial(give_out, rank))
    while events:
        now_s, _, event = heapq.heappop(events)
        event()
    return now_s


def shared_ratios(num_ranks: int, per_rank: int, *, seed: int, **how: Any) -> list[float]:
    """Return the seconds of steps after the first over those of equal shares."""
    rng = random.Random(seed)
    known: list[dict[str, float]] = [{} for _ in range(num_ranks)]
    steps_s = [shared_s(known, per_rank, rng, **how) for _ in range(NUM_STEPS)]
    return [step_s / per_rank for step_s in steps_s[1:]]


def ratios(
    num_replicas: int, per_replica: int, *, spread: float, jitter: float, seed: int
) -> dict[str, float]:
    """Return each column's seconds over the fluid bound, for one draw of speeds."""
    rng = random.Random(seed)
    rates = {str(index): rng.lognormvariate(0.0, spread) for index in range(num_replicas)}
    num_calls = num_replicas * per_replica
    known: dict[str, float] = {}
    steps_s = [
        queue_s(
            CallQueue(make_calls(num_calls), rates, known),
            rates,
            jitter=jitter,
            seed=NUM_STEPS * seed + step,
        )
        for step in range(NUM_STEPS)
    ]
    ideal_s = fluid_s(rates, num_calls * SAMPLES)
    seconds = (
        whole_calls_s(rates, num_calls),
        steps_s[0],
        fmean(steps_s[1:]),
        fewest_calls_s(rates, num_calls, jitter=jitter, seed=seed),
    )
    return {name: value / ideal_s for name, value in zip(COLUMNS, seconds, strict=True)}


def main(argv: Sequence[str]) -> int:
    parser = tool_parser(__doc__)
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--calls", type=int, nargs="+", default=[2, 4, 8], help="a replica")
    parser.add_argument("--spread", type=float, default=0.5, help="of the speeds' logarithms")
    parser.add_argument("--jitter", type=float, default=0.05, help="of a call's seconds")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=0, help="that share as many replicas")
    options = parser.parse_args(argv)

    if options.ranks:
        for counts_waits in (False, True):
            steps = [
                ratio
                for seed in range(options.seeds)
                for ratio in shared_ratios(
                    options.ranks,
                    max(options.calls),
                    seed=seed,
                    counts_waits=counts_waits,
                    jitter=options.jitter,
                )
            ]
            what = "waits taken for slowness" if counts_waits else "as it is"
            print(f"{what:>25} {fmean(steps):.3f} ({max(steps):.3f})")
        return 0

    print(f"{'calls a replica':>15}", *(f"{name:>14}" for name in COLUMNS))
    for per_replica in options.calls:
        rows = [
            ratios(
                options.replicas,
                per_replica,
                spread=options.spread,
                jitter=options.jitter,
                seed=seed,
            )
            for seed in range(options.seeds)
        ]
        cells = []
        for name in COLUMNS:
            values = [row[name] for row in rows]
            cells.append(f"{fmean(values):.2f} ({max(values):.2f})")
        print(f"{per_replica:>15}", *(f"{cell:>14}" for cell in cells), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
