"""Bring weights from the trainer to the replicas, and check that they arrived.

A push is begin(version, manifest, lora), bounded buckets, commit. It counts only when every replica
answers with the fingerprint of what was sent, for every tensor that it now uses: of this push or an
earlier one. For LoRA it also answers with the modules that it is bound to. A missing, extra or
different name is an error that names it. The replica refuses to generate until a whole push
succeeded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from megadiff.observe.metrics import stage_key
from megadiff.parallel.collectives import raise_together
from megadiff.parallel.plan import is_lora
from megadiff.sync.bucket import Bucket
from megadiff.sync.shared_base import SharedBase, mapped_send
from megadiff.sync.transports.base import SyncError, Transport
from megadiff.tensors.fingerprint import commit_digest, fingerprints
from megadiff.tensors.lora_names import Box, lora_manifest, lora_modules, used_tensor, worker_box
from megadiff.tensors.manifest import Manifest, name_difference
from megadiff.tensors.weight_groups import (
    WeightGroup,
    names_by_weight_group,
    rows_of_weight_groups,
    weight_group_of,
)
from megadiff.types import JsonObject, LoraSpec

# replica → for each of its workers: name → the box of the tensor that the worker has.
WorkerBoxes = Mapping[str, Sequence[Mapping[str, Box]]]


class WeightSource(Protocol):
    """An engine as the sync sees it.

    Both iterators are collective, and a tensor is the receiver's own. changed: the components whose
    trained weights may differ from what they were at mark_pushed(), the same on every rank.
    """

    @property
    def lora(self) -> LoraSpec | None: ...

    @property
    def changed(self) -> Set[str]: ...

    def named_weights(self, bucket_bytes: int, components: Collection[str]) -> Iterator[Bucket]: ...

    def named_lora(self, bucket_bytes: int, components: Collection[str]) -> Iterator[Bucket]: ...

    def mark_pushed(self) -> None: ...


@dataclass(eq=False)
class WeightSync:
    """Push weights to all replicas: a rank sends a bucket while it gathers the next one.

    After a whole push only what was trained since travels: the base weights of the engine's changed
    components, or with LoRA their LoRA tensors.
    transport: to this rank's replicas, which may be none. manifest: of the base weights. boxes: of
    the workers of all replicas that this rank shares.
    shared_base: the frozen base where replicas map it: its buckets are named to them, not sent.
    seconds: of the last push on this rank: `gather` (waiting for buckets), `send` (waiting for
    replicas), `fingerprint` and `commit`.
    """

    engine: WeightSource
    transport: Transport
    manifest: Manifest
    boxes: WorkerBoxes
    bucket_bytes: int
    cpu_group: dist.ProcessGroup
    shared_base: SharedBase | None = None
    version: int | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    _num_bytes: int = field(init=False, default=0)
    # None while replicas may hold anything.
    _sent: SentFingerprints | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        # Most workers have equal boxes. From here on those are one object, so that no push compares
        # hundreds of workers' two thousand boxes again.
        unlike: dict[frozenset[tuple[str, Box]], Mapping[str, Box]] = {}
        shared = {}
        for replica, workers in self.boxes.items():
            shared[replica] = [
                unlike.setdefault(frozenset(worker.items()), worker) for worker in workers
            ]
        self.boxes = shared

    def push(self, version: int) -> dict[str, float]:
        """Bring every replica to this version of the weights, unless it holds them. Collective.

        A version may have two sets of weights: those of a step, and their average for evaluation.
        Returns `sync/gib`, the size of what travelled last, and after a push
        `time/sync_<stage>_s`, this rank's `seconds`.
        Raises AgreedError when any replica refuses or differs.
        """
        seconds = {}
        # averaged() marks its components as changed on both ways, under one version
        if version != self.version or self.engine.changed:
            self.version = None
            self._push(version)
            self.version = version
            seconds = {stage_key(f"sync_{stage}"): value for stage, value in self.seconds.items()}
        return {"sync/gib": self._num_bytes / 2**30, **seconds}

    def wake(self) -> None:
        """Push at the next push() whatever its version, and what has changed alone.

        So replicas wake up that slept and kept the weights, as those with a shared base do.
        """
        self.version = None

    def forget(self) -> None:
        """Bring everything at the next push, whatever its version, as after Fleet.sleep()."""
        self.version = None
        self._sent = None

    def close(self) -> None:
        self.transport.close()

    def _push(self, version: int) -> None:
        earlier = self._sent
        # Unknown until the replicas have committed: a push after a failed one brings everything.
        self._sent = None
        lora = self.engine.lora
        whole = self.manifest | (lora_manifest(lora, self.manifest) if lora else {})
        all_groups = set(names_by_weight_group(whole))
        groups = all_groups
        sent = SentFingerprints(self.boxes, lora=lora)

        if earlier:
            changed = {WeightGroup(name, lora is not None) for name in self.engine.changed}
            groups = all_groups & changed
            sent.add_earlier(earlier, all_groups - groups)

        self.seconds = dict.fromkeys(("gather", "send", "fingerprint", "commit"), 0.0)
        error = self._send(version, sent, rows_of_weight_groups(whole, groups))
        # Only together: a rank that raised alone would leave the others in their next collective.
        raise_together(error, self.cpu_group)

        self.engine.mark_pushed()
        self._sent = sent
        self._num_bytes = sent.num_bytes

    def _send(
        self, version: int, sent: SentFingerprints, manifest: Manifest
    ) -> BaseException | None:
        thread = ThreadPoolExecutor(1, thread_name_prefix="sync")
        error: BaseException | None = None
        try:
            sending = thread.submit(self.transport.begin, version, manifest, self.engine.lora)
            send_base: Callable[[Bucket], None] = self.transport.send
            if self.shared_base and not all(map(is_lora, manifest)):
                send_base = mapped_send(self.shared_base, self.transport)

            # To the end, even after an error: the other ranks are in the same collectives.
            for bucket in self._gathered(manifest):
                error = error or self._outcome(sending, "send")
                if not error and self.transport.targets:
                    is_base = not is_lora(bucket[0][0])
                    sending = thread.submit(send_base if is_base else self.transport.send, bucket)
                    with self._timer("fingerprint"):  # while the bucket travels
                        sent.add(bucket, travels=not (is_base and self.shared_base))
            error = error or self._outcome(sending, "send")

            difference = name_difference(set(manifest), sent.new_names)
            if not error and self.transport.targets and difference:
                error = SyncError(
                    f"the trainer's tensors are not those of the model folder: {difference}"
                )

            if not error:
                names = [target.name for target in self.transport.targets]
                digests = {name: sent.digests(name) for name in names}
                commit = thread.submit(self.transport.commit, version, digests, sent.check)
                error = self._outcome(commit, "commit")
        except BaseException as failure:
            error = failure
            raise
        finally:
            # After an exception of this rank's own, do not wait for a replica.
            thread.shutdown(wait=False, cancel_futures=True)
            try:
                self.transport.end(error)
            except Exception as failure:
                error = error or failure
        return error

    def _gathered(self, manifest: Manifest) -> Iterator[Bucket]:
        # Sorted, as every rank must gather in the same order.
        groups = sorted(names_by_weight_group(manifest))
        base = [group.component for group in groups if not group.is_lora]
        lora = [group.component for group in groups if group.is_lora]
        buckets = chain(
            self.engine.named_weights(self.bucket_bytes, base) if base else (),
            self.engine.named_lora(self.bucket_bytes, lora) if lora else (),
        )

        while True:
            with self._timer("gather"):
                bucket = next(buckets, None)
            if bucket is None:
                return
            yield bucket
            # Or a third one would live while the next is gathered.
            del bucket

    def _outcome(self, future: Future[None], stage: str) -> BaseException | None:
        with self._timer(stage):
            return future.exception()

    @contextmanager
    def _timer(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] += time.perf_counter() - start


class SentFingerprints:
    """Remember the fingerprints of all tensors that replicas are to use, as workers hold them.

    There is a fingerprint for each box of a tensor that some worker has.
    boxes: of the replicas' workers. new_names: of the tensors of this push.
    """

    def __init__(self, boxes: WorkerBoxes, *, lora: LoraSpec | None) -> None:
        self.boxes = boxes
        self.lora = lora
        self.num_bytes = 0
        self.new_names: set[str] = set()
        self._digits: dict[tuple[str, Box | None], str] = {}
        # by identity, see WeightSync
        self._unlike = {id(worker): worker for worker in chain.from_iterable(boxes.values())}
        # filled when all of a push is here: id of boxes → what is expected there, and its digest
        self._of_boxes: dict[int, tuple[JsonObject, str]] = {}

    def add(self, bucket: Bucket, *, travels: bool = True) -> None:
        """Fingerprint a bucket of this push. travels: whether its bytes do."""
        cuts: dict[Box | None, dict[str, Tensor]] = {}
        for name, tensor in bucket:
            self.new_names.add(name)
            self.num_bytes += tensor.nbytes if travels else 0
            # a box that several workers have is hashed once
            for box in {self._box(name, boxes) for boxes in self._unlike.values()}:
                cut = tensor[tuple(slice(begin, end) for begin, end in box or ())]
                used = used_tensor(name, cut, self.lora) if self.lora else cut
                cuts.setdefault(box, {})[name] = used

        for box, tensors in cuts.items():
            for name, digits in fingerprints(tensors).items():
                self._digits[name, box] = digits

    def add_earlier(self, earlier: SentFingerprints, groups: Set[WeightGroup]) -> None:
        """Take over what an earlier push sent of these weight groups."""
        for (name, box), digits in earlier._digits.items():
            if weight_group_of(name) in groups:
                self._digits[name, box] = digits

    def digests(self, replica: str) -> list[str]:
        """Return the digest of what each of a replica's workers has to hold."""
        return [self._expected(boxes)[1] for boxes in self.boxes[replica]]

    def check(self, replica: str, version: int, answer: Sequence[Mapping[str, Any]]) -> None:
        """Compare a replica's answer to a commit, a row for each worker, with what was sent.

        A row is all names, or their digest alone.
        Raises SyncError that names the replica and what differs.
        """
        workers = self.boxes[replica]
        if len(answer) != len(workers):
            raise SyncError(f"{replica} answers for {len(answer)} workers, and has {len(workers)}")

        for index, (boxes, row) in enumerate(zip(workers, answer, strict=True)):
            expected, digest = self._expected(boxes)
            if row.get("digest") == digest:
                continue

            where = f"{replica} at version {version}"
            if len(workers) > 1:
                where += f" (worker {index} of {len(workers)})"

            # A digest that is another one names nothing: it counts as an answer without tensors.
            _check_fingerprints(where, expected["fingerprints"], row.get("fingerprints", {}))
            modules = set(row.get("bound_modules", ()))
            difference = name_difference(expected["bound_modules"], modules)
            if difference:
                raise SyncError(
                    f"{where} has LoRA bound to other modules than were sent: {difference}"
                )

    def _expected(self, boxes: Mapping[str, Box]) -> tuple[JsonObject, str]:
        """Return what a worker with these boxes has to answer, and its digest."""
        key = id(boxes)
        if key not in self._of_boxes:
            names = {name for name, _ in self._digits}
            digits = {name: self._digits[name, self._box(name, boxes)] for name in names}
            expected = {"fingerprints": digits, "bound_modules": lora_modules(names)}
            self._of_boxes[key] = expected, commit_digest(expected)
        return self._of_boxes[key]

    def _box(self, name: str, boxes: Mapping[str, Box]) -> Box | None:
        return worker_box(name, boxes, lora_rank=self.lora.rank if self.lora else 0)


def _check_fingerprints(where: str, expected: Mapping[str, str], actual: Mapping[str, str]) -> None:
    difference = name_difference(set(expected), set(actual))
    if difference:
        raise SyncError(f"{where} holds other tensors than were sent: {difference}")

    wrong = sorted(name for name, digits in expected.items() if actual[name] != digits)
    if wrong:
        examples = [f"{name} (sent {expected[name]}, held {actual[name]})" for name in wrong[:3]]
        raise SyncError(
            f"{where} holds {len(wrong)} of {len(expected)} tensors with other bits than were "
            f"sent: {', '.join(examples)}"
        )
