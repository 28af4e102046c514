"""What every transport of weights is: requests over HTTP that open, fill and close a push; only bytes travel differently."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

from megadiff.sync.bucket import Bucket, BucketBody
from megadiff.sync.transports.host_memory import HostMemory
from megadiff.tensors.manifest import Manifest
from megadiff.types import LoraSpec

POLL_S = 0.005  # between looks at a broadcast and at the answers of its requests


class SyncError(RuntimeError):
    """Weights did not arrive as they were sent; the text names the replica, and the tensors where it can."""


class WeightTarget(Protocol):
    """A replica as the sync sees it (`rollout.fleet.WeightTarget`). Each call waits for the replica's answer."""

    name: str
    url: str

    def weights_places(self) -> list[dict[str, Any]]: ...

    def weights_begin(
        self,
        version: int,
        manifest: Manifest,
        *,
        lora: LoraSpec | None,
        transport: Mapping[str, Any],
    ) -> None: ...

    def weights_bucket(self, bucket: BucketBody | Mapping[str, Any]) -> None: ...

    def weights_commit(self, version: int) -> list[dict[str, Any]]: ...


class Transport(ABC):
    """From one trainer rank to its targets, which may be none: begin, send bucket after bucket, commit, end.

    Every method returns when all targets have answered, and raises the first of their errors. One thread calls at a time.
    name: of the transport in a push, as table.TRANSPORTS has it.
    """

    name: str

    def __init__(self, targets: Sequence[WeightTarget]) -> None:
        self.targets = list(targets)
        self._pool = ThreadPoolExecutor(max(1, len(self.targets)), thread_name_prefix="weights")

    def begin(self, version: int, manifest: Manifest, lora: LoraSpec | None) -> None:
        """Opens the push on every target."""
        self.wait(
            self.start(
                lambda target: self._begin(target, version, manifest, lora, {"name": self.name})
            )
        )

    @abstractmethod
    def send(self, bucket: Bucket) -> None:
        """Brings a bucket to every target; afterwards its tensors are the caller's again."""

    def commit(
        self, version: int, check: Callable[[WeightTarget, list[dict[str, Any]]], None]
    ) -> None:
        """Closes the push; check(target, answer) raises when a target holds something else than was sent."""
        self.wait(self.start(lambda target: check(target, target.weights_commit(version))))

    def end(self, error: BaseException | None) -> None:  # noqa: B027, most have nothing to give back
        """After every push, also one that failed: gives back what it took."""

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def start(self, call: Callable[[WeightTarget], None]) -> list[Future[None]]:
        """call(target) for every target at once."""
        return [self._pool.submit(call, target) for target in self.targets]

    def wait(self, futures: Sequence[Future[None]]) -> None:
        """Waits for all, then raises the first failure: no target is still busy with what is given back afterwards."""
        wait(futures)
        for future in futures:
            future.result()

    def _begin(
        self,
        target: WeightTarget,
        version: int,
        manifest: Manifest,
        lora: LoraSpec | None,
        transport: Mapping[str, Any],
    ) -> None:
        target.weights_begin(version, manifest, lora=lora, transport=transport)


class HttpTransport(Transport):
    """The bucket is the body of the request: to any host."""

    name = "http"

    def __init__(self, targets: Sequence[WeightTarget]) -> None:
        super().__init__(targets)
        self._memory = HostMemory()

    def send(self, bucket: Bucket) -> None:
        body = self._memory.body(bucket)
        self.wait(self.start(lambda target: target.weights_bucket(body)))


def failed(futures: Sequence[Future[None]]) -> bool:
    """Whether one of them has ended with an error; does not wait."""
    return any(future.done() and future.exception() for future in futures)


def first_done(futures: Sequence[Future[None]]) -> bool:
    """Waits until all are done or one has failed; True when one has failed."""
    pending = set(futures)
    while pending and not failed(futures):
        _, pending = wait(pending, return_when=FIRST_COMPLETED)
    return failed(futures)
