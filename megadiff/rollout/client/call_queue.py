"""Cut a step into calls, give each to a replica, and decide what becomes of those that fail.

Pure state: seconds of a clock come in, no thread and no connection is here. Any replica that holds
the policy version may make any call, and draws the same bits, as the noise follows from the
samples' identities. So a failed call is made again elsewhere, and slow replicas get fewer.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field

# Of one replica from one rank: the second call waits there, so that it never idles in between.
CALLS_PER_REPLICA = 2
MAX_ERRORS = 2  # of one call by living replicas; then a third would not help
MAX_LOSSES = 5  # of replicas and connections that broke in one call
MAX_FAILURES = 3  # of one replica in a row; then its engine must be broken


def calls(
    group_sizes: Sequence[int], *, batch_size: int, num_replicas: int, most_groups: int
) -> list[range]:
    """Cut groups of these numbers of samples into calls: ranges of consecutive whole groups.

    A call holds at most batch_size samples and most_groups groups, but at least one group. All
    calls but the last hold equally many groups, so that no replica is idle in the last round.
    """
    # Nothing here may vary between two runs, such as which replica is faster: a batch's composition
    # changes float rounding, and a resumed run must equal the uninterrupted one bit by bit.
    if not group_sizes:
        return []
    num_groups = len(group_sizes)
    most = max(1, min(batch_size // max(group_sizes), most_groups))
    rounds = math.ceil(num_groups / (most * num_replicas))
    per_call = math.ceil(num_groups / (rounds * num_replicas))

    return [
        range(first, min(first + per_call, num_groups)) for first in range(0, num_groups, per_call)
    ]


@dataclass(eq=False)
class ReplicaCall:
    """One call to a replica: some of a step's requests, by their indices.

    Its composition never changes, as float rounding depends on it.
    errors: what living replicas answered, by their names. num_losses: how often the replica died,
    or the connection broke, in the middle of it.
    replica: who has drawn it, in engine_s seconds, of which it waited queue_s behind other calls.
    """

    indices: Sequence[int]
    num_samples: int
    is_done: bool = False
    errors: dict[str, str] = field(default_factory=dict)
    num_errors: int = 0
    num_losses: int = 0
    replica: str = ""
    engine_s: float = 0.0
    queue_s: float = 0.0

    @property
    def is_poisoned(self) -> bool:
        """Tell whether it has failed so often that the call itself must be at fault."""
        return self.num_errors >= MAX_ERRORS or self.num_losses >= MAX_LOSSES


@dataclass
class _Worker:
    """Hold what the queue knows of a replica.

    calls: that it has, each with the seconds when its turn came. others: samples that other
    ranks had with it at heard_s. rate: seconds a sample, None until its first answer.
    """

    rate: float | None
    calls: dict[ReplicaCall, float] = field(default_factory=dict)
    others: int = 0
    heard_s: float = 0.0
    num_failures: int = 0  # in a row

    def drop(self, call: ReplicaCall, now_s: float) -> None:
        """Take a call off it; the turn of the next one begins."""
        del self.calls[call]
        for waiting in self.calls:
            self.calls[waiting] = now_s

    @property
    def is_free(self) -> bool:
        """Tell whether it may get another call."""
        return len(self.calls) < (1 if self.rate is None else CALLS_PER_REPLICA)

    def outlook(self, usual_rate: float, now_s: float) -> tuple[float, float]:
        """Return the seconds until it would have drawn what it has, and its seconds a sample.

        usual_rate: of the others, for one that has not answered yet.
        """
        rate = usual_rate if self.rate is None else self.rate
        waited_s = 0.0
        if self.calls:
            oldest, since_s = next(iter(self.calls.items()))
            waited_s = now_s - since_s
            rate = max(rate, waited_s / oldest.num_samples)

        given = sum(call.num_samples for call in self.calls)
        others_s = max(0.0, rate * self.others - (now_s - self.heard_s))
        return max(0.0, rate * given - waited_s) + others_s, rate


class CallQueue:
    """Give calls out in order, each to the replica that would finish it first.

    A replica is as slow as its last answers were, and one that is late now is slower. One that has
    not answered yet gets one call at a time.
    """

    def __init__(
        self, calls: Iterable[ReplicaCall], replicas: Iterable[str], rates: dict[str, float]
    ) -> None:
        """Take the calls that are not done.

        replicas: names; of equally fast ones the first is taken. rates: seconds a sample, known
        from earlier steps, and kept up to date.
        """
        self._waiting = deque(call for call in calls if not call.is_done)
        self._rates = rates
        self._workers = {name: _Worker(rate=rates.get(name)) for name in replicas}

    @property
    def is_over(self) -> bool:
        """Tell whether every call has succeeded."""
        return not self._waiting and not self.busy

    @property
    def is_stuck(self) -> bool:
        """Tell whether calls are left, and no replica to make them."""
        return bool(self._waiting) and not self._workers

    @property
    def busy(self) -> list[str]:
        """Return the replicas that have a call."""
        return [name for name, worker in self._workers.items() if worker.calls]

    def take(self, now_s: float) -> tuple[ReplicaCall, str] | None:
        """Give out a call. None where all is given out, or waiting is better."""
        free = {name for name, worker in self._workers.items() if worker.is_free}
        if not self._waiting or not free:
            return None
        call, replica = self._retried(free) or self._next(free, now_s)
        if not call:
            return None
        self._waiting.remove(call)
        self._workers[replica].calls[call] = now_s
        return call, replica

    def _retried(self, free: Set[str]) -> tuple[ReplicaCall, str] | None:
        """Choose a call that a replica has answered with an error: it goes to another, if any."""
        for call in self._waiting:
            if call.errors:
                others = self._workers.keys() - call.errors
                choices = sorted(free & (others or self._workers.keys()))
                if choices:
                    return call, choices[0]
        return None

    def _next(self, free: Set[str], now_s: float) -> tuple[ReplicaCall | None, str]:
        """Choose the first call that a free replica would finish before any other could.

        All waiting calls are laid out over all replicas, each on the one that would finish it
        first. So at a step's end a slow replica stays idle where faster ones are done sooner.
        """
        rates = [worker.rate for worker in self._workers.values() if worker.rate is not None]
        usual = sum(rates) / len(rates) if rates else 1.0
        size = self._waiting[0].num_samples  # calls but the last are of one size
        heap = []

        for order, (name, worker) in enumerate(self._workers.items()):
            start_s, rate = worker.outlook(usual, now_s)
            heap.append((start_s + rate * size, order, name, rate))
        heapq.heapify(heap)

        for call in self._waiting:
            finish_s, order, name, rate = heap[0]
            if name in free and not call.errors:
                return call, name
            heapq.heapreplace(heap, (finish_s + rate * call.num_samples, order, name, rate))

        return None, ""

    def succeed(
        self, call: ReplicaCall, replica: str, *, seconds: float, outstanding: int, now_s: float
    ) -> None:
        """Note an answer.

        seconds: that it was drawn in. outstanding: samples that the replica has left, for anybody.
        """
        worker = self._workers[replica]
        worker.drop(call, now_s)
        call.is_done = True
        rate = seconds / call.num_samples
        worker.rate = rate if worker.rate is None else (worker.rate + rate) / 2
        given = sum(other.num_samples for other in worker.calls)
        worker.others = max(0, outstanding - given)
        worker.heard_s = now_s
        worker.num_failures = 0
        self._rates[replica] = worker.rate

    def fail(
        self, call: ReplicaCall, replica: str, error: str, *, is_answer: bool, now_s: float
    ) -> bool:
        """Take back a call that failed on a living replica, to be made again elsewhere.

        is_answer: the replica answered with the error; else the connection broke.
        Returns whether the replica is of no more use: it fails one call after another, or every
        replica has answered this call with an error.
        """
        worker = self._workers[replica]
        worker.drop(call, now_s)
        worker.num_failures += 1
        if is_answer:
            call.num_errors += 1
            call.errors[replica] = error
        else:
            call.num_losses += 1
        self._waiting.appendleft(call)
        is_last = is_answer and all(name in call.errors for name in self._workers)

        return worker.num_failures >= MAX_FAILURES or is_last

    def given_s(self, call: ReplicaCall, replica: str) -> float:
        """Return the seconds when a replica began with a call that it still has."""
        return self._workers[replica].calls[call]

    def lose(self, replica: str) -> dict[ReplicaCall, float]:
        """Take a replica out. Returns its calls, which wait for another one now.

        Each comes with the seconds when its turn came.
        """
        worker = self._workers.pop(replica, None)
        calls = worker.calls if worker else {}
        for call in list(calls)[:1]:  # those behind it had not begun
            call.num_losses += 1
        self._waiting.extendleft(reversed(calls))
        self._rates.pop(replica, None)

        return calls
