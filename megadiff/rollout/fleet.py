"""The replicas of a run, as one: start, wait, route each group to the least loaded, report a dead one at once."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from megadiff.rollout.client import ReplicaClient, ReplicaError
from megadiff.rollout.processes import ReplicaProcess, log_tail
from megadiff.types import LoraSpec, RolloutGroup, RolloutRequest
from megadiff.weights.bucket import BucketBody
from megadiff.weights.manifest import Manifest

logger = logging.getLogger(__name__)
T = TypeVar("T")
POLL_S = 0.2
PROGRESS_S = 5.0
CALLS_PER_REPLICA = 2  # one samples, the next waits at the replica, so that it never idles between calls


class ReplicaDied(RuntimeError):
    """A replica is gone; the text names it and shows the end of its log."""


class Fleet:
    """All replicas of the run seen from one trainer rank; a context manager.

    batch_size: samples of one call to a replica. processes: the replicas that this very rank started and watches (empty
    on the other ranks). logs: name → log file. rank, num_ranks: of those that share the replicas, each with its own Fleet.
    """

    def __init__(
        self,
        clients: Sequence[ReplicaClient],
        *,
        batch_size: int,
        processes: Sequence[ReplicaProcess] = (),
        logs: dict[str, Path] | None = None,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        self.batch_size = batch_size
        self.replicas, self.processes, self.logs = list(clients), list(processes), logs or {}
        self._load = {client.name: 0 for client in clients}
        self._lock = threading.Lock()
        self._share = max(1, len(self.replicas) // num_ranks)  # of the replicas: what this rank would have alone
        self._first_choice = rank * self._share % len(self.replicas)  # equal loads: ranks begin with different replicas
        self._pool = ThreadPoolExecutor(max_workers=CALLS_PER_REPLICA * len(self.replicas))

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drops what is still in flight; the processes are stopped by who started them."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for client in self.replicas:
            client.close()

    def generate(self, requests: Sequence[RolloutRequest]) -> Iterator[tuple[int, RolloutGroup]]:
        """Yields (index of the request, group) as groups arrive. Raises ReplicaDied or ReplicaError at the first failure.

        Requests of equal sampling. Prompts of similar length go into one call, since a batch is as wide as its longest one.
        """
        order = sorted(range(len(requests)), key=lambda index: len(requests[index].prompt.text))
        sizes = [len(requests[index].sample_indices) for index in order]
        cuts = calls(sizes, batch_size=self.batch_size, num_replicas=self._share)
        batches = [[order[place] for place in cut] for cut in cuts]
        futures = {self._pool.submit(self._one, [requests[index] for index in batch]): batch for batch in batches}
        pending: set[Future[list[RolloutGroup]]] = set(futures)
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
        """Groups of equal sampling in one call on a given replica, in the order of the requests."""
        return self.call(self.replicas[replica], lambda client: client.generate_batch(requests))

    def weight_targets(self) -> list[WeightTarget]:
        """The replicas as the weight sync sees them; one that dies in the middle of a push is reported as any other."""
        return [WeightTarget(self, client) for client in self.replicas]

    def check_alive(self) -> None:
        """Raises ReplicaDied when a process that this rank started has ended."""
        for process in self.processes:
            _raise_if_dead(process)

    def sleep(self) -> None:
        """Every replica frees its weights, until a push brings all of the policy's."""
        self._for_all(ReplicaClient.sleep)

    def trim(self) -> None:
        """Every replica gives memory back that it does not need at the moment."""
        self._for_all(ReplicaClient.trim)

    def _for_all(self, call: Callable[[ReplicaClient], object]) -> None:
        for future in [self._pool.submit(self.call, client, call) for client in self.replicas]:
            future.result()

    def _one(self, requests: Sequence[RolloutRequest]) -> list[RolloutGroup]:
        with self._lock:
            order = self.replicas[self._first_choice :] + self.replicas[: self._first_choice]
            client = min(order, key=lambda replica: self._load[replica.name])
            self._load[client.name] += 1
        try:
            return self.call(client, lambda replica: replica.generate_batch(requests))
        finally:
            with self._lock:
                self._load[client.name] -= 1

    def call(self, client: ReplicaClient, call: Callable[[ReplicaClient], T]) -> T:
        """call(client), with ReplicaDied and the end of its log in place of a connection that broke."""
        try:
            return call(client)
        except ReplicaError as error:
            if error.status is not None:
                raise
            time.sleep(POLL_S)  # the connection broke: give a dying process the moment it needs to be seen dead
            self.check_alive()
            tail = log_tail(self.logs[client.name]) if client.name in self.logs else ""
            raise ReplicaDied(f"{client.name} at {client.url} does not answer: {error}\n{tail}") from error


def calls(group_sizes: Sequence[int], *, batch_size: int, num_replicas: int) -> list[range]:
    """Cuts groups of these numbers of samples into calls: ranges of consecutive groups, each group whole.

    A call holds at most batch_size samples, but at least one group, and all calls but the last hold equally many groups: as
    many as leave no replica idle in a last round. It depends on nothing that varies between two runs, such as which replica
    is faster: a batch's composition changes float rounding, and a resumed run must equal the uninterrupted one bit by bit.
    """
    if not group_sizes:
        return []
    num_groups, most = len(group_sizes), max(1, batch_size // max(group_sizes))
    rounds = math.ceil(num_groups / (most * num_replicas))
    per_call = math.ceil(num_groups / (rounds * num_replicas))
    return [range(first, min(first + per_call, num_groups)) for first in range(0, num_groups, per_call)]


class WeightTarget:
    """Fulfils weights.transports.WeightTarget for one replica of a fleet."""

    def __init__(self, fleet: Fleet, client: ReplicaClient) -> None:
        self.name, self.url, self._client, self._call = client.name, client.url, client, fleet.call

    def weights_places(self) -> list[dict[str, Any]]:
        return self._call(self._client, ReplicaClient.weights_places)

    def weights_begin(
        self, version: int, manifest: Manifest, *, lora: LoraSpec | None, transport: Mapping[str, Any]
    ) -> None:
        begin = partial(ReplicaClient.weights_begin, lora=lora, transport=transport)
        self._call(self._client, lambda client: begin(client, version, manifest))

    def weights_bucket(self, bucket: BucketBody | Mapping[str, Any]) -> None:
        self._call(self._client, lambda client: client.weights_bucket(bucket))

    def weights_commit(self, version: int) -> list[dict[str, Any]]:
        return self._call(self._client, lambda client: client.weights_commit(version))


def wait_until_announced(
    registry: Path, *, count: int, timeout_s: float, processes: Sequence[ReplicaProcess] = ()
) -> list[dict[str, Any]]:
    """{"name", "url", …} of the first `count` healthy replicas, by name, that announced themselves in the registry folder, each
    with what /health says under "health".

    Logs a progress line every few seconds. Raises ReplicaDied when one of the processes ends, or after timeout_s.
    An announcement that a killed replica left behind does not count.
    """
    start, last_line = time.monotonic(), 0.0
    while True:
        for process in processes:
            _raise_if_dead(process)
        found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(registry.glob("*.json"))]
        answers = [(entry, _health(entry)) for entry in found]
        healthy = [entry | {"health": health} for entry, health in answers if health][:count]
        elapsed = time.monotonic() - start
        if len(healthy) == count:
            logger.info("%d replicas healthy after %.1f s", count, elapsed)
            if len(found) > count:
                logger.warning(
                    "%d replicas are announced in %s; rollout.num_replicas=%d of them are used",
                    len(found),
                    registry,
                    count,
                )
            return healthy
        if elapsed > timeout_s:
            tails = "\n".join(log_tail(process.spec.log) for process in processes)
            silent = [f"{entry['name']} at {entry['url']}" for entry, health in answers if not health]
            raise ReplicaDied(
                f"{len(healthy)} of rollout.num_replicas={count} replicas healthy in {registry} after {elapsed:.0f} s, "
                f"rollout.start_timeout_s={timeout_s:.0f}; raise it, or start more with `megadiff serve MODEL "
                f"--registry {registry}` (on other nodes with --host ADDRESS)"
                + (f"; announced, but no answer from here: {', '.join(silent[:8])}" if silent else "")
                + f"\n{tails}"
            )
        if elapsed - last_line > PROGRESS_S:
            last_line = elapsed
            logger.info(
                "waiting for replicas: %d of %d healthy, %.0f s of at most %.0f s",
                len(healthy),
                count,
                elapsed,
                timeout_s,
            )
        time.sleep(POLL_S)


def _health(entry: dict[str, str]) -> dict[str, Any] | None:
    """Of the replica that announced itself, None if it does not answer: another may have its port by now, and would get two
    pushes."""
    with closing(ReplicaClient(entry["url"], entry["name"])) as client:
        return client.health_if_up()


def _raise_if_dead(process: ReplicaProcess) -> None:
    text = process.exit_text()
    if text:
        raise ReplicaDied(text)
