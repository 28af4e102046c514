"""Define what all transports of weights share: HTTP requests that open, fill and close a push.

Only the bytes of a bucket travel differently.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

from megadiff.sync.bucket import Bucket, BucketBody
from megadiff.sync.transports.host_memory import HostMemory
from megadiff.tensors.manifest import Manifest, manifest_json
from megadiff.types import LoraSpec


class SyncError(RuntimeError):
    """Weights did not arrive as they were sent; names the replica, and tensors where known."""


class GroupBrokeError(SyncError):
    """A replica has waited in vain for the others of a process group; who is to blame is open."""


class PushTarget(Protocol):
    """A replica as the sync sees it. Each call waits for the replica's answer.

    manifest: as JSON. digests: of what the workers should answer to the commit. has_served: it has
    taken a push before. lose(): the run goes on without it.
    """

    name: str
    url: str

    @property
    def has_served(self) -> bool: ...

    def weights_begin(
        self,
        version: int,
        manifest: bytes,
        *,
        lora: LoraSpec | None,
        transport: Mapping[str, Any],
    ) -> None: ...

    def weights_bucket(self, bucket: BucketBody | Mapping[str, Any]) -> None: ...

    def weights_commit(self, version: int, digests: Sequence[str]) -> list[dict[str, Any]]: ...

    def lose(self, reason: str) -> None: ...


class Transport(ABC):
    """Carry a push from one trainer rank to its targets, which may be none.

    A push is begin, bucket after bucket, commit, end. Every method returns when all targets have
    answered, and raises the first of their errors. One thread calls at a time.
    name: of the transport in a push, as table.TRANSPORTS has it.
    """

    name: str

    def __init__(self, targets: Sequence[PushTarget]) -> None:
        self.targets = list(targets)
        # At least one: a rank may have no targets, and an executor refuses to have no threads.
        self._pool = ThreadPoolExecutor(max(1, len(self.targets)), thread_name_prefix="weights")

    def begin(self, version: int, manifest: Manifest, lora: LoraSpec | None) -> None:
        """Open the push on every target."""
        self.wait(self.start_begin(version, manifest, lora))

    @abstractmethod
    def send(self, bucket: Bucket) -> None:
        """Bring a bucket to every target; afterwards its tensors are the caller's again."""

    def commit(
        self,
        version: int,
        digests: Mapping[str, Sequence[str]],
        check: Callable[[str, int, list[dict[str, Any]]], None],
    ) -> None:
        """Close the push; check(name, version, answer) raises when a target holds another.

        digests: target → what its workers should answer.
        """

        def close(target: PushTarget) -> None:
            expected = list(digests[target.name])
            answer = target.weights_commit(version, expected)
            check(target.name, version, answer)
            # A replica serves only what has the digests that came with the request.
            if [row.get("digest") for row in answer] != expected:
                raise SyncError(
                    f"{target.name} holds version {version} as it was sent, but was told another "
                    "digest of it, so it does not serve it; push again"
                )

        self.wait(self.start(close))

    def end(self, error: BaseException | None) -> None:  # noqa: B027, most have nothing to give back
        """Give back what a push took. It is called after a failed one, too."""

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def description(self, target: PushTarget) -> dict[str, Any]:
        """Return what the target is told of this transport when a push begins."""
        return {"name": self.name}

    def start_begin(
        self, version: int, manifest: Manifest, lora: LoraSpec | None
    ) -> list[Future[None]]:
        # Once: the names of two thousand tensors for each of hundreds of targets take seconds.
        text = manifest_json(manifest)
        return self.start(
            lambda target: target.weights_begin(
                version, text, lora=lora, transport=self.description(target)
            )
        )

    def start(self, call: Callable[[PushTarget], None]) -> list[Future[None]]:
        """Start call(target) for every target at once."""
        return [self._pool.submit(call, target) for target in self.targets]

    def wait(self, futures: Sequence[Future[None]]) -> None:
        """Wait for all, then raise the first failure."""
        # No target may still read what the caller takes back after an error.
        wait(futures)
        for future in futures:
            future.result()


class HttpTransport(Transport):
    """Send a bucket as the body of its request, to any host."""

    name = "http"

    def __init__(self, targets: Sequence[PushTarget]) -> None:
        super().__init__(targets)
        self._memory = HostMemory()

    def send(self, bucket: Bucket) -> None:
        # One body for all targets: each request iterates it anew.
        body = self._memory.body(bucket)
        self.wait(self.start(lambda target: target.weights_bucket(body)))
