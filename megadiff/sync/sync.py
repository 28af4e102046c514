"""Weights from the trainer to the replicas: begin(version, manifest, lora) → bounded buckets → commit with fingerprints.

A push counts only when every replica answers, for every tensor that it now uses, the fingerprint of what was sent, in this
push or before, and for LoRA the modules that it is bound to. A missing, extra or different name is an error that names it,
and the replica refuses to generate until a whole push succeeded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from megadiff.observe.metrics import stage_key
from megadiff.parallel.collectives import raise_together
from megadiff.sync.bucket import Bucket
from megadiff.sync.transports.base import SyncError, Transport
from megadiff.tensors.fingerprint import fingerprints
from megadiff.tensors.lora_names import Box, lora_manifest, lora_modules, used_tensor, worker_box
from megadiff.tensors.manifest import Manifest, name_difference
from megadiff.tensors.weight_groups import (
    WeightGroup,
    names_by_weight_group,
    rows_of_weight_groups,
    weight_group_of,
)
from megadiff.types import LoraSpec

logger = logging.getLogger(__name__)
Places = Mapping[
    str, Sequence[Mapping[str, Box]]
]  # replica → of each worker: name → the part that it has


class WeightSource(Protocol):
    """An engine as the sync sees it. Both iterators are collective, and a tensor is the receiver's own.

    changed: the components whose trained weights may differ from what they were at mark_pushed(), the same on every rank.
    """

    @property
    def lora(self) -> LoraSpec | None: ...

    @property
    def changed(self) -> Set[str]: ...

    def named_weights(self, bucket_bytes: int, components: Collection[str]) -> Iterator[Bucket]: ...

    def named_lora(self, bucket_bytes: int, components: Collection[str]) -> Iterator[Bucket]: ...

    def mark_pushed(self) -> None: ...


class WeightSync:
    """Every rank gathers bucket after bucket; those with replicas to send to send one while the next is gathered.

    transport: to this rank's replicas, which may be none. places: where their workers' pieces lie. manifest: of the base
    weights. After a whole push only what was trained since travels: of the engine's changed components the base weights, or
    with LoRA its tensors. seconds: of the last push on this rank, `gather` (waiting for buckets), `send` (waiting for
    replicas), `fingerprint` and `commit`.
    """

    def __init__(
        self,
        engine: WeightSource,
        transport: Transport,
        manifest: Manifest,
        *,
        places: Places,
        bucket_bytes: int,
        cpu_group: dist.ProcessGroup,
    ) -> None:
        self.engine, self.transport, self.manifest, self.places = (
            engine,
            transport,
            manifest,
            places,
        )
        self.bucket_bytes, self.cpu_group = bucket_bytes, cpu_group
        self.version: int | None = None
        self.seconds: dict[str, float] = {}
        self._sent = 0
        self._held: Ledger | None = None  # of what every replica uses

    def push(self, version: int) -> dict[str, float]:
        """Collective. Brings every replica to this version of the weights, unless it is there; returns `sync/gib`, the size
        of what travelled last, and where something did `time/sync_<part>_s`, this rank's `seconds`.

        Raises AgreedError when any replica refuses or differs.
        """
        seconds = {}
        if version != self.version:
            self.version = None
            self._push(version)
            self.version = version
            seconds = {stage_key(f"sync_{part}"): value for part, value in self.seconds.items()}
        return {"sync/gib": self._sent / 2**30, **seconds}

    def forget(self) -> None:
        """The replicas hold nothing any more, as after Fleet.sleep(): the next push brings everything, whatever its version."""
        self.version, self._held = None, None

    def close(self) -> None:
        self.transport.close()

    def _push(self, version: int) -> None:
        held, self._held = self._held, None  # unknown, until the replicas have committed
        lora = self.engine.lora
        whole = self.manifest | (lora_manifest(lora, self.manifest) if lora else {})
        every = parts = set(names_by_weight_group(whole))
        if held:
            parts = every & {
                WeightGroup(component, is_lora=lora is not None)
                for component in self.engine.changed
            }
        ledger = Ledger(self.places, lora=lora, held=held.of(every - parts) if held else None)
        self.seconds = dict.fromkeys(("gather", "send", "fingerprint", "commit"), 0.0)
        error = self._send(version, ledger, rows_of_weight_groups(whole, parts))
        raise_together(error, self.cpu_group)
        self.engine.mark_pushed()
        self._held, self._sent = ledger, ledger.num_bytes

    def _send(self, version: int, ledger: Ledger, manifest: Manifest) -> Exception | None:
        """Every bucket is gathered to the end even after an error: the other ranks are in the same collectives."""
        thread = ThreadPoolExecutor(1, thread_name_prefix="sync")
        error: Exception | None = None
        try:
            sending = thread.submit(self.transport.begin, version, manifest, self.engine.lora)
            for bucket in self._timed(self._buckets(manifest)):
                error = error or self._outcome(sending, "send")
                if error or not self.transport.targets:
                    continue
                sending = thread.submit(self.transport.send, bucket)
                with self._timer("fingerprint"):  # while the bucket travels
                    ledger.add(bucket)
            error = error or self._outcome(sending, "send")
            if not error and self.transport.targets:
                error = _names_error(set(manifest), ledger.sent)
            if not error:
                check = CommitCheck(version, ledger)
                error = self._outcome(
                    thread.submit(self.transport.commit, version, check), "commit"
                )
        except BaseException as failure:
            error = failure
            raise
        finally:
            thread.shutdown(
                wait=False, cancel_futures=True
            )  # when it is left by an exception, do not wait for a replica
            error = self._end(error)
        return error

    def _end(self, error: BaseException | None) -> BaseException | None:
        try:
            self.transport.end(error)
        except Exception as failure:
            return error or failure
        return error

    def _buckets(self, manifest: Manifest) -> Iterator[Bucket]:
        parts = sorted(names_by_weight_group(manifest))
        base, lora = (
            [part.component for part in parts if part.is_lora == is_lora]
            for is_lora in (False, True)
        )
        if base:
            yield from self.engine.named_weights(self.bucket_bytes, base)
        if lora:
            yield from self.engine.named_lora(self.bucket_bytes, lora)

    def _timed(self, buckets: Iterator[Bucket]) -> Iterator[Bucket]:
        while True:
            with self._timer("gather"):
                bucket = next(buckets, None)
            if bucket is None:
                return
            yield bucket
            del bucket  # or a third one would live while the next is gathered

    def _outcome(self, future: Future[None], what: str) -> Exception | None:
        with self._timer(what):
            return future.exception()

    def _timer(self, what: str) -> _Timer:
        return _Timer(self.seconds, what)


class Ledger:
    """The fingerprints of what replicas are to use, as their workers use it: of every piece of a tensor that some worker
    has, of this push and of what it leaves as it was."""

    def __init__(
        self, places: Places, *, lora: LoraSpec | None, held: Ledger | None = None
    ) -> None:
        """held: of what travelled before, when this push does not bring everything."""
        self.places, self.lora, self.lora_rank = places, lora, lora.rank if lora else 0
        self.num_bytes = 0
        self.sent: set[str] = set()
        self._prints: dict[tuple[str, Box | None], str] = dict(held._prints) if held else {}

    def add(self, bucket: Bucket) -> None:
        for box, pieces in self._pieces(bucket).items():
            found = fingerprints(pieces)
            self._prints |= {(name, box): value for name, value in found.items()}
        self.sent |= {name for name, _ in bucket}
        self.num_bytes += sum(tensor.nbytes for _, tensor in bucket)

    def expected(self, replica: str, worker: int) -> dict[str, str]:
        """name → fingerprint of what this worker must hold."""
        boxes = self.places[replica][worker]
        names = {name for name, _ in self._prints}
        return {
            name: self._prints[name, worker_box(name, boxes, lora_rank=self.lora_rank)]
            for name in names
        }

    def modules(self) -> set[str]:
        """The modules, with their component, that a LoRA must be bound to."""
        return lora_modules(name for name, _ in self._prints)

    def of(self, parts: Collection[WeightGroup]) -> Ledger:
        """With the tensors of these parts alone."""
        rest = Ledger(self.places, lora=self.lora)
        rest._prints = {
            key: value for key, value in self._prints.items() if weight_group_of(key[0]) in parts
        }
        return rest

    def _pieces(self, bucket: Bucket) -> dict[Box | None, dict[str, Tensor]]:
        """box → name → the piece of the tensor, over all workers."""
        pieces: dict[Box | None, dict[str, Tensor]] = {}
        workers = [boxes for replica in self.places.values() for boxes in replica]
        for name, tensor in bucket:
            for box in {worker_box(name, boxes, lora_rank=self.lora_rank) for boxes in workers}:
                cut = tensor if box is None else tensor[tuple(slice(*one) for one in box)]
                pieces.setdefault(box, {})[name] = used_tensor(name, cut, self.lora)
        return pieces


class Named(Protocol):
    name: str


class CommitCheck:
    """What a replica answers to a commit, against what was sent to it."""

    def __init__(self, version: int, ledger: Ledger) -> None:
        self.version, self.ledger = version, ledger

    def __call__(self, target: Named, answer: Sequence[Mapping[str, Any]]) -> None:
        """Raises SyncError that names the replica and what differs."""
        num_workers = len(self.ledger.places[target.name])
        if len(answer) != num_workers:
            raise SyncError(
                f"{target.name} answers for {len(answer)} workers, and has {num_workers}"
            )
        for worker, held in enumerate(answer):
            where = f"{target.name} at version {self.version}"
            where += f" (worker {worker} of {num_workers})" if num_workers > 1 else ""
            _check_prints(where, self.ledger.expected(target.name, worker), held["fingerprints"])
            difference = name_difference(self.ledger.modules(), set(held["bound_modules"]))
            if difference:
                raise SyncError(
                    f"{where} has LoRA bound to other modules than were sent: {difference}"
                )


def _check_prints(where: str, expected: Mapping[str, str], held: Mapping[str, str]) -> None:
    difference = name_difference(set(expected), set(held))
    if difference:
        raise SyncError(f"{where} holds other tensors than were sent: {difference}")
    wrong = sorted(name for name, value in expected.items() if held[name] != value)
    if wrong:
        raise SyncError(
            f"{where} holds {len(wrong)} of {len(expected)} tensors with other bits than were "
            f"sent: {', '.join(f'{name} (sent {expected[name]}, held {held[name]})' for name in wrong[:3])}"
        )


def _names_error(expected: set[str], sent: set[str]) -> SyncError | None:
    difference = name_difference(expected, sent)
    return (
        SyncError(f"the trainer's tensors are not those of the model folder: {difference}")
        if difference
        else None
    )


class _Timer:
    """Adds the seconds of its context to seconds[what]."""

    def __init__(self, seconds: dict[str, float], what: str) -> None:
        self.seconds, self.what = seconds, what

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds[self.what] += time.perf_counter() - self.start
