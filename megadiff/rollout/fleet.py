"""The replicas of a run, as one: start, wait, route each group to the least loaded, report a dead one at once."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

from megadiff.rollout.client import ReplicaClient, ReplicaError
from megadiff.rollout.processes import ReplicaProcess, ReplicaSpec, log_tail, stop_all
from megadiff.types import RolloutGroup, RolloutRequest

logger = logging.getLogger(__name__)
T = TypeVar("T")
POLL_S = 0.2
PROGRESS_S = 5.0
REQUESTS_PER_REPLICA = 2  # one samples, the next waits at the replica, so that it never idles between groups


class ReplicaDied(RuntimeError):
    """A replica is gone; the text names it and shows the end of its log."""


class Fleet:
    """All replicas of the run seen from one trainer rank; a context manager.

    processes: the replicas that this very rank started and watches (empty on the other ranks). logs: name → log file.
    """

    def __init__(
        self,
        clients: Sequence[ReplicaClient],
        *,
        processes: Sequence[ReplicaProcess] = (),
        logs: dict[str, Path] | None = None,
        rank: int = 0,
    ) -> None:
        self.replicas, self.processes, self.logs = list(clients), list(processes), logs or {}
        self._load = {client.name: 0 for client in clients}
        self._lock = threading.Lock()
        self._first_choice = rank % len(self.replicas)  # equal loads: ranks begin with different replicas
        self._pool = ThreadPoolExecutor(max_workers=REQUESTS_PER_REPLICA * len(self.replicas))

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops what this rank started; safe to call twice."""
        stop_all(self.processes)
        self._pool.shutdown(wait=False, cancel_futures=True)
        for client in self.replicas:
            client.close()

    def generate(self, requests: Sequence[RolloutRequest]) -> Iterator[tuple[int, RolloutGroup]]:
        """Yields (index of the request, group) as groups arrive. Raises ReplicaDied or ReplicaError at the first failure."""
        futures = {self._pool.submit(self._one, request): index for index, request in enumerate(requests)}
        pending: set[Future[RolloutGroup]] = set(futures)
        try:
            while pending:
                done, pending = wait(pending, timeout=POLL_S, return_when=FIRST_COMPLETED)
                self.check_alive()
                for future in done:
                    yield futures[future], future.result()
        finally:
            for future in pending:
                future.cancel()

    def generate_on(self, replica: int, request: RolloutRequest) -> RolloutGroup:
        """One group on a given replica."""
        return self._call(self.replicas[replica], lambda client: client.generate(request))

    def check_alive(self) -> None:
        """Raises ReplicaDied when a process that this rank started has ended."""
        for process in self.processes:
            text = process.exit_text()
            if text:
                raise ReplicaDied(text)

    def for_all(self, call: Callable[[ReplicaClient], object]) -> None:
        """Calls every replica, in parallel; raises the first failure."""
        for future in [self._pool.submit(self._call, client, call) for client in self.replicas]:
            future.result()

    def _one(self, request: RolloutRequest) -> RolloutGroup:
        with self._lock:
            order = self.replicas[self._first_choice :] + self.replicas[: self._first_choice]
            client = min(order, key=lambda replica: self._load[replica.name])
            self._load[client.name] += 1
        try:
            return self._call(client, lambda replica: replica.generate(request))
        finally:
            with self._lock:
                self._load[client.name] -= 1

    def _call(self, client: ReplicaClient, call: Callable[[ReplicaClient], T]) -> T:
        try:
            return call(client)
        except ReplicaError as error:
            if error.status is not None:
                raise
            time.sleep(POLL_S)  # the connection broke: give a dying process the moment it needs to be seen dead
            self.check_alive()
            tail = log_tail(self.logs[client.name]) if client.name in self.logs else ""
            raise ReplicaDied(f"{client.name} at {client.url} does not answer: {error}\n{tail}") from error


def launch_replicas(specs: Sequence[ReplicaSpec], *, request_timeout_s: float) -> Fleet:
    """Starts the processes and returns at once; `wait_until_healthy` waits. Close the fleet to stop them."""
    processes = [ReplicaProcess(spec) for spec in specs]
    clients = [ReplicaClient(process.url, process.spec.name, timeout_s=request_timeout_s) for process in processes]
    return Fleet(clients, processes=processes, logs={spec.name: spec.log for spec in specs})


def wait_until_healthy(fleet: Fleet, *, timeout_s: float) -> None:
    """Blocks until every replica answers /health; logs a progress line every few seconds. Raises ReplicaDied."""
    start, last_line = time.monotonic(), 0.0
    waiting = list(fleet.replicas)
    while waiting:
        fleet.check_alive()
        waiting = [client for client in waiting if not client.is_healthy()]
        elapsed = time.monotonic() - start
        if waiting and elapsed > timeout_s:
            names = ", ".join(client.name for client in waiting)
            tails = "\n".join(log_tail(fleet.logs[client.name]) for client in waiting if client.name in fleet.logs)
            raise ReplicaDied(
                f"{names} not healthy after {elapsed:.0f} s, rollout.start_timeout_s={timeout_s:.0f}; raise it or read "
                f"the log:\n{tails}"
            )
        if waiting and elapsed - last_line > PROGRESS_S:
            last_line = elapsed
            logger.info(
                "waiting for replicas: %d of %d healthy, %.0f s of at most %.0f s",
                len(fleet.replicas) - len(waiting),
                len(fleet.replicas),
                elapsed,
                timeout_s,
            )
        time.sleep(POLL_S if waiting else 0)
    logger.info("%d replicas healthy after %.1f s", len(fleet.replicas), time.monotonic() - start)


def registered_replicas(registry: Path, *, count: int, timeout_s: float) -> list[dict[str, str]]:
    """The first `count` replicas, by name, that `megadiff serve --registry` has announced as `<name>.json`."""
    start = time.monotonic()
    while True:
        files = sorted(registry.glob("*.json")) if registry.is_dir() else []
        if len(files) >= count:
            return [json.loads(path.read_text(encoding="utf-8")) for path in files[:count]]
        if time.monotonic() - start > timeout_s:
            raise ReplicaDied(
                f"{len(files)} replicas in rollout.registry={registry}, rollout.num_replicas={count} wanted, after "
                f"{timeout_s:.0f} s; start more with `megadiff serve MODEL --registry {registry}`"
            )
        time.sleep(POLL_S)
