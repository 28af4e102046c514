"""Weights from the trainer to the replicas: begin(version, manifest) → bounded buckets → commit with fingerprints.

A push counts only when every replica answers, for every tensor it now holds, the fingerprint of what was sent. A missing,
extra or different name is an error that names it, and the replica refuses to generate until a whole push succeeded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from megadiff.parallel.collectives import raise_together
from megadiff.weights.fingerprint import fingerprints
from megadiff.weights.manifest import Manifest, name_difference

logger = logging.getLogger(__name__)


class SyncError(RuntimeError):
    """A replica does not hold the weights that were sent; the text names replica and tensors."""


class WeightTarget(Protocol):
    """A replica as the sync sees it (`rollout.client.ReplicaClient`)."""

    name: str

    def weights_begin(self, version: int, manifest: Manifest) -> None: ...

    def weights_bucket(self, tensors: Sequence[tuple[str, Tensor]]) -> None: ...

    def weights_commit(self, version: int) -> dict[str, str]: ...


class WeightSource(Protocol):
    """An engine as the sync sees it."""

    def named_weights(self, bucket_bytes: int): ...


class HttpSync:
    """Rank 0 gathers bucket after bucket and sends each to all replicas at once, while the next is gathered."""

    def __init__(
        self,
        engine: WeightSource,
        targets: Sequence[WeightTarget],
        manifest: Manifest,
        *,
        bucket_bytes: int,
        cpu_group: dist.ProcessGroup,
    ) -> None:
        self.engine, self.targets, self.manifest = engine, list(targets), manifest
        self.bucket_bytes, self.cpu_group = bucket_bytes, cpu_group
        self.is_sender = dist.get_rank() == 0
        self.version: int | None = None
        self.sent = 0

    def push(self, version: int) -> dict[str, float]:
        """Collective. Brings every replica to this version of the weights, unless it is there; returns `sync/gib`, its size.

        Raises AgreedError when any replica refuses or differs.
        """
        if version != self.version:
            self.version = None
            self.sent = self._push(version)
            self.version = version
        return {"sync/gib": self.sent / 2**30}

    def _push(self, version: int) -> int:
        if not self.is_sender:
            for _ in self.engine.named_weights(self.bucket_bytes):
                pass
            raise_together(None, self.cpu_group)
            return 0
        error, sent = self._send(version)
        raise_together(error, self.cpu_group)
        return sent

    def _send(self, version: int) -> tuple[Exception | None, int]:
        """Every bucket is gathered to the end even after an error: the other ranks are in the same collectives."""
        expected: dict[str, str] = {}
        error: Exception | None = None
        sent = 0
        pool = ThreadPoolExecutor(max_workers=len(self.targets))
        try:
            pending = self._start(pool, lambda target: target.weights_begin(version, self.manifest))
            for bucket in self.engine.named_weights(self.bucket_bytes):
                error = error or _first_error(pending)
                if error:
                    continue
                expected |= fingerprints(dict(bucket))
                sent += sum(tensor.numel() * tensor.element_size() for _, tensor in bucket)
                pending = self._start(pool, lambda target, bucket=bucket: target.weights_bucket(bucket))
            error = error or _first_error(pending) or _names_error(set(self.manifest), set(expected))
            if not error:
                pending = self._start(pool, lambda target: _commit(target, version, expected))
                error = _first_error(pending)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # when it is left by an exception, do not wait for a replica
        return error, sent

    def _start(self, pool: ThreadPoolExecutor, call: Callable[[WeightTarget], None]) -> list:
        return [pool.submit(call, target) for target in self.targets]


def _commit(target: WeightTarget, version: int, expected: dict[str, str]) -> None:
    held = target.weights_commit(version)
    difference = name_difference(set(expected), set(held))
    if difference:
        raise SyncError(f"{target.name} at version {version} holds other tensors than were sent: {difference}")
    wrong = sorted(name for name, value in expected.items() if held[name] != value)
    if wrong:
        raise SyncError(
            f"{target.name} at version {version} holds {len(wrong)} of {len(expected)} tensors with other bits than were "
            f"sent: {', '.join(f'{name} (sent {expected[name]}, held {held[name]})' for name in wrong[:3])}"
        )


def _names_error(expected: set[str], sent: set[str]) -> SyncError | None:
    difference = name_difference(expected, sent)
    return SyncError(f"the trainer's tensors are not those of the model folder: {difference}") if difference else None


def _first_error(futures: list) -> Exception | None:
    """Waits for all; returns the first failure."""
    errors = [future.exception() for future in futures]
    return next((error for error in errors if error), None)
