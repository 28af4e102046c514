"""A checkpoint's shard files, one a rank, read by whichever box of a tensor is asked for.

A shard file is plain safetensors. What no safetensors field says is JSON in the header's metadata:
for each shard its tensor, its box in that, and its fingerprint. So any layout can read what any
other has written. The first shard of a tensor in a file has the tensor's name there, a further one
NAME#1, NAME#2, …

Fingerprints cover the tensors' bytes, the header's seal covers the header: no bit is just trusted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megadiff.process.descriptors import reserve_descriptors
from megadiff.process.garbage import without_collections
from megadiff.tensors.covering import cover
from megadiff.tensors.seals import SEAL_KEY, UNSEALED
from megadiff.tensors.shard_index import (
    FORMAT,
    METADATA_KEY,
    StoredShard,
    TensorBox,
    read_index,
    stored_shards,
)
from megadiff.tensors.tensor_file import TensorFile, TensorMeta, TensorWriter
from megadiff.types import JsonObject, Shape

SHARD_SUFFIX = ".safetensors"
UNKNOWN = "0" * 16  # a fingerprint before it is known: as wide as any
UNFINISHED = ".unfinished"  # behind the name of a file that is not closed
# The kinds of weights in a checkpoint, whose names are KIND/COMPONENT.NAME.
TRAINED = "model"
AVERAGED = "average"
LAGGING = "lagging"


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A box of a tensor, in memory. offsets: where it begins in the full tensor of that shape."""

    local: Tensor
    offsets: tuple[int, ...]
    shape: Shape


def shard_file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}{SHARD_SUFFIX}"


class ShardWriter:
    """One rank's file of float32 shards, which close() completes and gives its name.

    fingerprints: of each shard by its key, filled in before close().
    """

    def __init__(
        self,
        folder: Path,
        boxes: Mapping[str, TensorBox],
        *,
        rank: int,
        num_files: int,
        values: Mapping[str, object],
    ) -> None:
        """boxes: by the shards' keys. values: JSON, the same on every rank. Raises OSError."""
        self.fingerprints = dict.fromkeys(boxes, UNKNOWN)
        self._boxes = dict(boxes)
        self._num_files = num_files
        self._values = dict(values)
        tensors = {
            key: TensorMeta(dtype=torch.float32, shape=box.local_shape)
            for key, box in boxes.items()
        }
        self._target = shard_file(folder, rank)
        # So whoever sees the name sees a whole file: other ranks look for it.
        unfinished = self._target.with_suffix(UNFINISHED)
        self.file = TensorWriter(unfinished, tensors, metadata=self._metadata())

    def close(self, *, sync: bool = False) -> None:
        """Write the fingerprints. sync: the file is on the disk when this returns."""
        self.file.close(metadata=self._metadata(), sync=sync)
        self.file.path.rename(self._target)

    def _metadata(self) -> dict[str, str]:
        entries = {
            key: {**box._asdict(), "fingerprint": self.fingerprints[key]}
            for key, box in self._boxes.items()
        }
        index = {
            "format": FORMAT,
            "num_files": self._num_files,
            "values": self._values,
            "tensors": entries,
        }
        return {METADATA_KEY: json.dumps(index), SEAL_KEY: UNSEALED}


class ShardFolder:
    """The shard files of a checkpoint, as the full tensors that they make up.

    values: what the snapshots had. shapes: name → shape of the full tensor. num_files: of as
    many ranks. The shards of a tensor are disjoint and cover it. Raises ValueError, naming the file
    and where it can the tensor, when a file is missing, damaged or of another checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        file, index = read_index(shard_file(self.folder, 0))
        self.values: JsonObject = index["values"]
        self.num_files: int = index["num_files"]
        self.shapes: dict[str, Shape] = {}
        self._shards: dict[str, list[StoredShard]] = {}
        # What was read last: boxes of one range often overlap the same shard.
        self._last: tuple[StoredShard, Tensor] | None = None

        # all stay open: a box that is asked for may lie in any of them
        reserve_descriptors(self.num_files, what=f"{self.folder}, a file for each rank,")
        # collections would take more than half of the time
        with without_collections():
            self._read_files(file, index)
            for name, shards in self._shards.items():
                _check_cover(self.folder, name, shards)

    def _read_files(self, file: TensorFile, index: JsonObject) -> None:
        """Note the shards of all files. file, index: of rank 0, which is open already."""
        tuples: dict[Shape, Shape] = {}
        for rank in range(self.num_files):
            if rank:
                file, index = read_index(shard_file(self.folder, rank))
                self._check_index(file, index)
            for shard in stored_shards(file, index, tuples):
                name = shard.box.tensor
                shape = self.shapes.get(name)
                if shape is None:
                    self.shapes[name] = shard.box.shape
                    self._shards[name] = [shard]
                    continue
                if shape != shard.box.shape:
                    raise ValueError(
                        f"{file.path} is corrupt: {name!r} has shape {shard.box.shape}, and "
                        f"{shape} elsewhere"
                    )
                self._shards[name].append(shard)

    def _check_index(self, file: TensorFile, index: Mapping[str, object]) -> None:
        for key, expected in (("num_files", self.num_files), ("values", self.values)):
            if index[key] != expected:
                raise ValueError(
                    f"{file.path} has {key}={index[key]!r:.200}, but that of rank 0 has "
                    f"{expected!r:.200}; they are of two checkpoints, use the one before"
                )

    def meta(self, name: str) -> TensorMeta:
        """Return dtype and shape of a full tensor. Raises ValueError when its shards disagree."""
        shards = self._shards[name]
        dtypes = {shard.file.tensors[shard.key].dtype for shard in shards}
        if len(dtypes) > 1:
            raise ValueError(
                f"{shards[0].file.path}: {name!r} has pieces of "
                f"{' and '.join(sorted(map(str, dtypes)))}"
            )
        return TensorMeta(dtype=dtypes.pop(), shape=self.shapes[name])

    def tensor(self, name: str) -> Tensor:
        """Return a full tensor, not to be written to. Raises ValueError for a damaged shard."""
        meta = self.meta(name)
        shards = self._shards[name]
        # a whole tensor in one file is not copied: it may be the file's own pages
        if len(shards) == 1:
            return shards[0].read()
        full = torch.empty(meta.shape, dtype=meta.dtype)
        self.read_into(name, Shard(local=full, offsets=(0,) * len(meta.shape), shape=meta.shape))
        return full

    def read_into(self, name: str, target: Shard) -> None:
        """Fill target.local, bit for bit, from whichever shards overlap it.

        Every shard that is read is checked whole. Raises ValueError.
        """
        if name not in self._shards:
            raise ValueError(
                f"{self.folder} holds no tensor {name!r}; another model or engine wrote it"
            )
        if self.shapes[name] != target.shape:
            raise ValueError(
                f"{self.folder}: {name!r} has shape {self.shapes[name]}, but this model's is "
                f"{target.shape}; load it with the model that wrote it"
            )

        for shard in self._shards[name]:
            overlap = _overlap(
                shard.box.offsets, shard.box.local_shape, target.offsets, target.local.shape
            )
            if overlap is None:
                continue
            of_shard, of_target = overlap
            source = self._read(shard)
            if source.dtype != target.local.dtype:
                raise ValueError(
                    f"{shard.file.path}: {name!r} is {source.dtype}, but this engine holds it as "
                    f"{target.local.dtype}"
                )
            target.local[of_target].copy_(source[of_shard])

    def _read(self, shard: StoredShard) -> Tensor:
        last = self._last  # once, as another thread may replace it
        if last and last[0] is shard:
            return last[1]
        tensor = shard.read()
        self._last = (shard, tensor)
        return tensor


def _check_cover(folder: Path, name: str, shards: Sequence[StoredShard]) -> None:
    """Raise ValueError unless the shards are disjoint and cover their tensor."""
    shape = shards[0].box.shape
    if cover(((shard.box.offsets, shard.box.local_shape) for shard in shards), shape):
        return

    num_stored = sum(math.prod(shard.box.local_shape) for shard in shards)
    num_wanted = math.prod(shape)
    if num_stored < num_wanted:
        raise ValueError(
            f"{folder}: {num_stored} of the {num_wanted} elements of {name!r} are in its files; "
            "the checkpoint is incomplete, use the one before"
        )
    raise ValueError(
        f"{folder}: the {len(shards)} pieces of {name!r}, of {num_stored} elements in all, do not "
        f"cover its {num_wanted} elements once each; the checkpoint is corrupt, use the one before"
    )


def _overlap(
    first_offsets: Sequence[int],
    first_shape: Sequence[int],
    second_offsets: Sequence[int],
    second_shape: Sequence[int],
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return where two boxes of one tensor meet, as slices of each; None when they do not."""
    of_first = []
    of_second = []
    # Not by numpy: a rank asks this of every other rank's shard, most of which it has no part in.
    for first_begin, first_size, second_begin, second_size in zip(
        first_offsets, first_shape, second_offsets, second_shape, strict=True
    ):
        begin = max(first_begin, second_begin)
        end = min(first_begin + first_size, second_begin + second_size)
        if begin >= end:
            return None
        of_first.append(slice(begin - first_begin, end - first_begin))
        of_second.append(slice(begin - second_begin, end - second_begin))
    return tuple(of_first), tuple(of_second)
