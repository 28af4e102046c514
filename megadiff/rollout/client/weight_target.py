"""Show the weight sync one replica of a fleet."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from megadiff.rollout.client.client import ReplicaClient, ReplicaError
from megadiff.rollout.client.report import HUNG, Loss
from megadiff.rollout.limits import GROUP_BROKE, LOCKED, OWNER_SILENT_S
from megadiff.sync.bucket import BucketBody
from megadiff.sync.transports.base import GroupBrokeError
from megadiff.types import LoraSpec

if TYPE_CHECKING:  # imports this file
    from megadiff.rollout.client.fleet import Fleet

logger = logging.getLogger(__name__)
T = TypeVar("T")
GIVE_UP_S = 10.0  # after an owner's silence is over
SERVER_ERRORS = 500  # and above: the replica's fault, not the request's


class WeightTarget:
    """Be one replica of a fleet as sync.transports.base.PushTarget.

    A replica that dies in the middle of a push is reported as any other.
    """

    def __init__(self, client: ReplicaClient, fleet: Fleet) -> None:
        self.name = client.name
        self.url = client.url
        self._client = client
        self._fleet = fleet

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

        def begin(client: ReplicaClient) -> None:
            client.weights_begin(version, manifest, lora=lora, transport=transport)

        while True:
            try:
                return self._call_in_group(begin)
            except ReplicaError as error:
                # only an owner that is gone is worth waiting for: other refusals would come again
                if error.status != LOCKED or time.monotonic() > deadline:
                    raise
                if not said:
                    logger.warning("%s; waiting for it", error)
                said = True
            time.sleep(1.0)

    def weights_bucket(self, bucket: BucketBody | Mapping[str, Any]) -> None:
        self._call_in_group(lambda client: client.weights_bucket(bucket))

    def weights_commit(self, version: int, digests: Sequence[str]) -> list[dict[str, Any]]:
        workers = self._call(lambda client: client.weights_commit(version, digests))
        self._fleet.holders.add(self._client)
        return workers

    @property
    def has_served(self) -> bool:
        """Tell whether it has taken a whole push: what fits it once fits again."""
        return self._client in self._fleet.holders

    def lose(self, reason: str) -> None:
        self._fleet.lose(self._client, Loss(reason, HUNG))

    def _call_in_group(self, call: Callable[[ReplicaClient], T]) -> T:
        """Return call(client) as _call() does; GroupBrokeError where others of a group failed."""
        try:
            return self._call(call)
        except ReplicaError as error:
            if error.status != GROUP_BROKE:
                raise
            raise GroupBrokeError(f"{self.name}: {error}") from error

    def _call(self, call: Callable[[ReplicaClient], T]) -> T:
        """Return call(client) as the fleet's call() does; a replica that fails is lost as well.

        It has taken a push before, so others and its own next process can take this one. Where it
        has not, weights and replica may not fit: nobody else could do better.
        """
        try:
            return self._fleet.call(self._client, call)
        except ReplicaError as error:
            assert error.status is not None
            if not self.has_served:
                raise
            if error.status < SERVER_ERRORS and self._fleet.is_alive(self._client, error):
                raise
            raise self._fleet.death(self._client, error, "cannot take the weights") from error
