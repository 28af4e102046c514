"""Copy tensors into files: each of two threads reads, cuts, hashes and writes a tensor at a time.

Two tensors are in memory, and of each the part that is being written, however large the model is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megadiff.tensors.fingerprint import fingerprint
from megadiff.tensors.shard_index import TensorBox
from megadiff.tensors.stored_tensors import StoredTensor, StoredTensors
from megadiff.tensors.tensor_file import TensorMeta, TensorWriter

# Two threads share all of the work, which one reader beside one writer would not: reading and
# hashing take twice as long as writing. More of them would take more memory.
NUM_THREADS = 2

Advance = Callable[[int], object]  # is told the number of bytes read or written


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A tensor's place in a file that is written. box: the part that goes there; None: all of it.

    fingerprints: where the part's fingerprint is noted under its key.
    """

    file: TensorWriter
    key: str
    box: TensorBox | None = None
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
        """Write every tensor into its slots.

        Raises ValueError for a damaged source, and OSError when a file cannot be written.
        """
        with ThreadPoolExecutor(NUM_THREADS, "convert") as pool:
            try:
                copies = [
                    pool.submit(self._copy, name, tensors[name], slots_of_tensor)
                    for name, slots_of_tensor in slots.items()
                ]
                # In order, so that of several damaged tensors the first is named.
                for copy in copies:
                    self._advance(copy.result())
            finally:
                # After an error nobody wants what is queued: gigabytes need not be read for it.
                pool.shutdown(cancel_futures=True)

    def copy_to_file(
        self,
        path: Path,
        tensors: StoredTensors,
        metas: Mapping[str, TensorMeta],
        *,
        prefix: str,
        metadata: Mapping[str, str],
    ) -> None:
        """Write a new file. metas: of its tensors, whose names in `tensors` begin with prefix."""
        with closing(TensorWriter(path, metas, metadata=metadata)) as file:
            slots = {f"{prefix}{key}": [Slot(file=file, key=key)] for key in metas}
            self.copy(tensors, slots)

    def _copy(self, name: str, stored: StoredTensor, slots: Sequence[Slot]) -> int:
        """Return the number of bytes written."""
        tensor = stored.read()
        if not _is_finite(tensor):
            self.not_finite.add(name)
        # Of what was read and cast: reading DST back must give the same.
        if self._verify:
            self.fingerprints[name] = fingerprint(tensor)

        for slot in slots:
            part = _cut(tensor, slot.box) if slot.box else tensor
            if slot.fingerprints is not None:
                slot.fingerprints[slot.key] = fingerprint(part)
            slot.file.write(slot.key, part)
        return tensor.nbytes


def _cut(tensor: Tensor, box: TensorBox) -> Tensor:
    ranges = zip(box.offsets, box.local_shape, strict=True)
    # The writer takes a tensor's bytes as they lie in memory.
    return tensor[tuple(slice(begin, begin + size) for begin, size in ranges)].contiguous()


def _is_finite(tensor: Tensor) -> bool:
    # A sum takes half the time of extremes. It is finite when all is, but for an overflow.
    total = tensor.sum(dtype=torch.float32)
    return bool(total.isfinite()) or all(bool(extreme.isfinite()) for extreme in tensor.aminmax())
