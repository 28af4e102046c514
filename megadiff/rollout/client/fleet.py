"""The replicas of a run as one: route groups to the least loaded, report a dead one at once."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any, TypeVar

from megadiff.rollout.client.client import RELEASE_TIMEOUT_S, ReplicaClient, ReplicaError
from megadiff.rollout.client.processes import ReplicaDied, ReplicaProcess, log_tail
from megadiff.rollout.limits import LOCKED, OWNER_SILENT_S, Limits
from megadiff.sync.bucket import BucketBody
from megadiff.types import LoraSpec, RolloutGroup, RolloutRequest, Sampling

logger = logging.getLogger(__name__)
T = TypeVar("T")
POLL_S = 0.2
GIVE_UP_S = 10.0  # after an owner's silence is over
ALIVE_S = 15.0  # between two signs of life; below OWNER_SILENT_S
LIMITS = Limits()
CALLS_PER_REPLICA = 2  # the next one waits at the replica, so that it never idles between calls


@dataclass(eq=False)
class Fleet(AbstractContextManager["Fleet"]):
    """All replicas of the run seen from one trainer rank; a context manager.

    batch_size: samples of one call to a replica. processes: those that this very rank started and
    watches. logs: name → log file. rank, num_ranks: of the Fleets that share the replicas.
    holds_replicas: for one rank only, which tells the replicas that the run is alive, and when it
    is over.
    """

    replicas: Sequence[ReplicaClient]
    _: KW_ONLY
    batch_size: int
    processes: Sequence[ReplicaProcess] = ()
    logs: Mapping[str, Path] = field(default_factory=dict)
    rank: int = 0
    num_ranks: int = 1
    holds_replicas: bool = False

    def __post_init__(self) -> None:
        self._closed = threading.Event()
        self._load = {client.name: 0 for client in self.replicas}
        self._lock = threading.Lock()
        # As many as this rank would have for itself.
        self._num_replicas = max(1, len(self.replicas) // self.num_ranks)
        # Where loads are equal, ranks begin with different replicas.
        first = self.rank * self._num_replicas % len(self.replicas)
        self._choices = [*self.replicas[first:], *self.replicas[:first]]
        self._pool = ThreadPoolExecutor(max_workers=CALLS_PER_REPLICA * len(self.replicas))
        if self.holds_replicas:
            threading.Thread(target=self._stay_alive, name="fleet-alive", daemon=True).start()

    def __exit__(self, *_: object) -> None:
        """Drop what is still in flight; the processes are stopped by who started them."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._closed.set()
        if self.holds_replicas:
            self._release()
        for client in self.replicas:
            client.close()

    def _stay_alive(self) -> None:
        """Keep the replicas this run's while it trains and sends them nothing."""
        # A pool of its own: the other may be full of requests, and one replica may be slow.
        with ThreadPoolExecutor(max_workers=min(len(self.replicas), 16)) as pool:
            while not self._closed.wait(ALIVE_S):
                futures = [pool.submit(client.say_alive) for client in self.replicas]
                wait(futures)  # errors are for the calls that need an answer

    def _release(self) -> None:
        """Free the replicas for another run; one that does not hear it misses this run in time."""
        # A pool of its own: the other may be full of requests that are still in flight.
        pool = ThreadPoolExecutor(max_workers=len(self.replicas))
        futures = {pool.submit(client.release): client for client in self.replicas}
        wait(futures, timeout=RELEASE_TIMEOUT_S)
        pool.shutdown(wait=False, cancel_futures=True)
        for future, client in futures.items():
            if future.cancelled() or not future.done() or future.exception():
                logger.debug("%s did not hear that the run is over", client.name)

    def generate(self, requests: Sequence[RolloutRequest]) -> Iterator[tuple[int, RolloutGroup]]:
        """Yield (index of the request, group) as groups arrive.

        Raises ReplicaDied or ReplicaError at the first failure.
        """
        # A batch is as wide as its longest prompt: those of similar length go into one call.
        order = sorted(range(len(requests)), key=lambda index: len(requests[index].prompt.text))
        futures: dict[Future[list[RolloutGroup]], list[int]] = {}
        for batch in self._batches(requests, order):
            future = self._pool.submit(self._sample, [requests[index] for index in batch])
            futures[future] = batch

        pending = set(futures)
        try:
            while pending:
                done, pending = wait(pending, timeout=POLL_S, return_when=FIRST_COMPLETED)
                self.check_alive()
                for future in done:
                    yield from zip(futures[future], future.result(), strict=True)
        finally:
            for future in pending:
                future.cancel()

    def generate_on(self, replica: int, requests: Sequence[RolloutRequest]) -> list[RolloutGroup]:
        """Return the groups of a given replica, in order, from one call for each sampling."""
        groups: dict[int, RolloutGroup] = {}
        client = self.replicas[replica]
        for batch in self._batches(requests, range(len(requests)), whole=True):
            called = [requests[index] for index in batch]
            drawn = self.call(client, methodcaller("generate_batch", called))
            groups |= zip(batch, drawn, strict=True)
        return [groups[index] for index in range(len(requests))]

    def _batches(
        self, requests: Sequence[RolloutRequest], order: Iterable[int], *, whole: bool = False
    ) -> list[list[int]]:
        """Cut requests into calls, each of equal sampling; return their indices.

        whole: a call holds all of a sampling that its body takes, however many replicas there are.
        """
        by_sampling: dict[Sampling, list[int]] = {}
        for index in order:
            by_sampling.setdefault(requests[index].sampling, []).append(index)

        batches = []
        for sampling, indices in by_sampling.items():
            sizes = [len(requests[index].sample_indices) for index in indices]
            cuts = calls(
                sizes,
                batch_size=len(sizes) * max(sizes) if whole else self.batch_size,
                num_replicas=1 if whole else self._num_replicas,
                most_groups=LIMITS.num_requests(sampling.images),
            )
            batches += [indices[cut.start : cut.stop] for cut in cuts]
        return batches

    def weight_targets(self) -> list[WeightTarget]:
        """Return the replicas as the weight sync sees them."""
        return [WeightTarget(self, client) for client in self.replicas]

    def check_alive(self) -> None:
        """Raise ReplicaDied when a process that this rank started has ended."""
        for process in self.processes:
            process.check_alive()

    def sleep(self) -> None:
        """Let every replica free its weights, until a push brings all of the policy's."""
        self._for_all(ReplicaClient.sleep)

    def trim(self) -> None:
        """Let every replica give back memory that it does not need at the moment."""
        self._for_all(ReplicaClient.trim)

    def _for_all(self, call: Callable[[ReplicaClient], object]) -> None:
        for future in [self._pool.submit(self.call, client, call) for client in self.replicas]:
            future.result()

    def _sample(self, requests: Sequence[RolloutRequest]) -> list[RolloutGroup]:
        """Return the groups of one call on the least loaded replica."""
        # the pool's threads choose at the same time
        with self._lock:
            client = min(self._choices, key=lambda replica: self._load[replica.name])
            self._load[client.name] += 1
        try:
            return self.call(client, lambda replica: replica.generate_batch(requests))
        finally:
            with self._lock:
                self._load[client.name] -= 1

    def call(self, client: ReplicaClient, call: Callable[[ReplicaClient], T]) -> T:
        """Return call(client). Raises ReplicaDied, with its log's end, for a broken connection."""
        try:
            return call(client)
        except ReplicaError as error:
            if error.status is not None:
                raise
            time.sleep(POLL_S)  # a dying process needs a moment to be seen dead
            self.check_alive()
            tail = log_tail(self.logs[client.name]) if client.name in self.logs else ""
            text = f"{client.name} at {client.url} does not answer: {error}\n{tail}"
            raise ReplicaDied(text) from error


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


class WeightTarget:
    """One replica of a fleet as sync.transports.base.PushTarget.

    A replica that dies in the middle of a push is reported as any other.
    """

    def __init__(self, fleet: Fleet, client: ReplicaClient) -> None:
        self.name = client.name
        self.url = client.url
        self._client = client
        self._call = partial(fleet.call, client)

    def health(self) -> Mapping[str, Any]:
        return self._client.health()

    def hang_up(self, reason: str) -> None:
        """Close its connections: requests that wait for an answer fail."""
        self._client.close()

    def weights_places(self) -> list[dict[str, Any]]:
        return self._call(ReplicaClient.weights_places)

    def weights_begin(
        self,
        version: int,
        manifest: bytes,
        *,
        lora: LoraSpec | None,
        transport: Mapping[str, Any],
    ) -> None:
        """Open a push; waits for a replica of a run that may be gone, as one that was killed is."""
        deadline = time.monotonic() + OWNER_SILENT_S + GIVE_UP_S
        said = False

        while True:
            try:
                return self._call(
                    lambda client: client.weights_begin(
                        version, manifest, lora=lora, transport=transport
                    )
                )
            except ReplicaError as error:
                # only an owner that is gone is worth waiting for: other refusals would come again
                if error.status != LOCKED or time.monotonic() > deadline:
                    raise
                if not said:
                    logger.warning("%s; waiting for it", error)
                said = True
            time.sleep(1.0)

    def weights_bucket(self, bucket: BucketBody | Mapping[str, Any]) -> None:
        self._call(lambda client: client.weights_bucket(bucket))

    def weights_commit(self, version: int, digests: Sequence[str]) -> list[dict[str, Any]]:
        return self._call(lambda client: client.weights_commit(version, digests))
