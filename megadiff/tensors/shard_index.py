"""Read what a shard file's header says of its shards, and check it against the tensors there.

A checkpoint of hundreds of ranks has millions of shards, and each rank reads of all of them. So
what is told of one is a tuple, and shares names and numbers with the others.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from megadiff.tensors.fingerprint import fingerprint
from megadiff.tensors.model_files import parse_json
from megadiff.tensors.seals import SEAL_KEY
from megadiff.tensors.tensor_file import TensorFile, are_integers, check_format
from megadiff.types import JsonObject, Shape

METADATA_KEY = "megadiff"
FORMAT = 4  # of that JSON


class TensorBox(NamedTuple):
    """A box of a tensor of some shape: where it begins, and its own shape."""

    tensor: str
    shape: Shape
    offsets: tuple[int, ...]
    local_shape: Shape


class StoredShard(NamedTuple):
    """A shard in a file. key: its name there. fingerprint: what was written with it."""

    file: TensorFile
    key: str
    box: TensorBox
    fingerprint: str

    def read(self) -> Tensor:
        """Return the shard. Raises ValueError when its bytes have another fingerprint."""
        tensor = self.file.tensor(self.key)
        if fingerprint(tensor) != self.fingerprint:
            raise ValueError(
                f"{self.file.path}: tensor {self.key!r} does not match its fingerprint; the file "
                "is corrupt"
            )
        return tensor


def read_index(path: Path) -> tuple[TensorFile, JsonObject]:
    """Open a shard file and parse its metadata. Raises ValueError where either is damaged."""
    if not path.is_file():
        raise ValueError(f"{path} is missing; the checkpoint is incomplete, use the one before")
    file = TensorFile(path)
    try:
        index = parse_json(file.metadata[METADATA_KEY])
        written_as = index.get("format", 1)
    except (ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is a safetensors file, but not one of a checkpoint") from error

    check_format(path, written_as, FORMAT)
    kinds = {"num_files": int, "values": dict, "tensors": dict}
    odd = [key for key, kind in kinds.items() if type(index.get(key)) is not kind]
    if SEAL_KEY not in file.metadata or odd or index["num_files"] < 1:
        lacking = ", ".join(odd) or "seal, or no files"
        raise ValueError(f"{path} is corrupt: its metadata has no {lacking}")
    return file, index


def stored_shards(
    file: TensorFile, index: Mapping[str, Any], tuples: dict[Shape, Shape]
) -> Iterator[StoredShard]:
    """Yield a file's shards. tuples: those that are known, as most boxes share theirs."""
    if index["tensors"].keys() != file.tensors.keys():
        raise ValueError(
            f"{file.path} is corrupt: its metadata lists other tensors than its header"
        )

    for key, entry in index["tensors"].items():
        try:
            box = _box(entry, tuples)
            written = str(entry["fingerprint"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{file.path} is corrupt: of {key!r} its metadata says {entry!r:.300}"
            ) from error

        stored_shape = file.tensors[key].shape
        if box.local_shape != stored_shape:
            raise ValueError(
                f"{file.path} is corrupt: {key!r} has shape {stored_shape} and {box.local_shape}"
            )
        yield StoredShard(file, sys.intern(key), box, written)


def _box(entry: Mapping[str, Any], tuples: dict[Shape, Shape]) -> TensorBox:
    """Raise KeyError, TypeError or ValueError for an entry that is none."""
    tensor = entry["tensor"]
    shape = tuple(entry["shape"])
    offsets = tuple(entry["offsets"])
    local_shape = tuple(entry["local_shape"])

    if not isinstance(tensor, str):
        raise ValueError(f"the tensor's name is {tensor!r}")
    is_whole = len(shape) == len(offsets) == len(local_shape)
    if not is_whole or not are_integers((*shape, *offsets, *local_shape)):
        raise ValueError(f"{shape}, {offsets} and {local_shape} are not each {len(shape)} numbers")
    # Only now: 1.0 and true equal 1, and would pass for it.
    return TensorBox(
        sys.intern(tensor),
        tuples.setdefault(shape, shape),
        tuples.setdefault(offsets, offsets),
        tuples.setdefault(local_shape, local_shape),
    )
