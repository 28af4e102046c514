"""Show the weight sync one replica of a fleet."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from megadiff.rollout.client.client import ReplicaClient, ReplicaError
from megadiff.rollout.limits import LOCKED, OWNER_SILENT_S
from megadiff.sync.bucket import BucketBody
from megadiff.types import LoraSpec

logger = logging.getLogger(__name__)
T = TypeVar("T")
GIVE_UP_S = 10.0  # after an owner's silence is over


class FleetCall(Protocol):
    """Return call(client); raise ReplicaDied where that has lost the replica."""

    def __call__(self, client: ReplicaClient, call: Callable[[ReplicaClient], T]) -> T: ...


class WeightTarget:
    """Be one replica of a fleet as sync.transports.base.PushTarget.

    A replica that dies in the middle of a push is reported as any other.
    call: of the fleet. on_commit: told of the client when it has taken a whole push.
    """

    def __init__(
        self,
        client: ReplicaClient,
        call: FleetCall,
        *,
        on_commit: Callable[[ReplicaClient], object],
    ) -> None:
        self.name = client.name
        self.url = client.url
        self._client = client
        self._call = call
        self._on_commit = on_commit

    def weights_places(self) -> list[dict[str, Any]]:
        return self._call(self._client, ReplicaClient.weights_places)

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
                    self._client,
                    lambda client: client.weights_begin(
                        version, manifest, lora=lora, transport=transport
                    ),
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
        self._call(self._client, lambda client: client.weights_bucket(bucket))

    def weights_commit(self, version: int, digests: Sequence[str]) -> list[dict[str, Any]]:
        workers = self._call(self._client, lambda client: client.weights_commit(version, digests))
        self._on_commit(self._client)
        return workers
