"""Copy tensors into files, one at a time: one thread reads, casts, cuts and hashes, another writes.

Two tensors are in memory, or as many small ones as AHEAD_BYTES hold, however large the model is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from megadiff.convert.layouts import Box
from megadiff.convert.stored_tensors import StoredTensor, StoredTensors
from megadiff.tensors.fingerprint import fingerprint
from megadiff.tensors.tensor_file import TensorWriter

AHEAD_BYTES = 64 << 20  # of tensors that are read before they are written

Advance = Callable[[int], object]  # is told the number of bytes read or written


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A tensor's place in a file that is written. box: the part that goes there; None: all of it.

    fingerprints: where the part's fingerprint is noted under its key.
    """

    file: TensorWriter
    key: str
    box: Box | None = None
    fingerprints: dict[str, str] | None = None


class Copier:
    """Copies tensors into slots, and notes what it saw.

    fingerprints: tensor → fingerprint of what was to be written, if they are to be verified.
    not_finite: tensors with NaN or infinity in them.
    """

    def __init__(self, *, advance: Advance, verify: bool) -> None:
        self.fingerprints: dict[str, str] = {}
        self.not_finite: set[str] = set()
        self._advance = advance
        self._verify = verify

    def copy(self, tensors: StoredTensors, slots: Mapping[str, Sequence[Slot]]) -> None:
        """Write every tensor into its slots, in the order of `slots`.

        Raises ValueError for a damaged source, and OSError when a file cannot be written.
        """
        pending: deque[tuple[int, Future[list[tuple[Slot, Tensor]]]]] = deque()
        bytes_ahead = 0
        pool = ThreadPoolExecutor(1, "convert")
        try:
            for name, slots_of_tensor in slots.items():
                future = pool.submit(self._prepare, name, tensors[name], slots_of_tensor)
                num_bytes = tensors[name].meta.num_bytes
                pending.append((num_bytes, future))
                bytes_ahead += num_bytes
                # The newest stays pending, so that it is read while older ones are written.
                while len(pending) > 1 and bytes_ahead > AHEAD_BYTES:
                    num_bytes, future = pending.popleft()
                    bytes_ahead -= num_bytes
                    self._write(future.result())
            for _, future in pending:
                self._write(future.result())
        finally:
            # After an error nobody takes what is queued: gigabytes need not be read for it.
            pool.shutdown(cancel_futures=True)

    def _prepare(
        self, name: str, stored: StoredTensor, slots: Sequence[Slot]
    ) -> list[tuple[Slot, Tensor]]:
        tensor = stored.read()
        if not _is_finite(tensor):
            self.not_finite.add(name)
        # Of what was read and cast: reading DST back must give the same.
        if self._verify:
            self.fingerprints[name] = fingerprint(tensor)
        parts = []
        for slot in slots:
            part = _cut(tensor, slot.box)
            if slot.fingerprints is not None:
                slot.fingerprints[slot.key] = fingerprint(part)
            parts.append((slot, part))
        return parts

    def _write(self, parts: Sequence[tuple[Slot, Tensor]]) -> None:
        for slot, part in parts:
            slot.file.write(slot.key, part)
            self._advance(part.nbytes)


def _cut(tensor: Tensor, box: Box | None) -> Tensor:
    if box is None:
        return tensor
    slices = [slice(begin, begin + size) for begin, size in zip(*box, strict=True)]
    # The writer takes a tensor's bytes as they lie in memory.
    return tensor[tuple(slices)].contiguous()


def _is_finite(tensor: Tensor) -> bool:
    # A sum takes half the time of extremes. It is finite when all is, but for an overflow.
    total = tensor.sum(dtype=torch.float32)
    return bool(total.isfinite()) or all(bool(extreme.isfinite()) for extreme in tensor.aminmax())
