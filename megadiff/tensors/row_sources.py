"""Full tensors that come as blocks of rows: from safetensors files, from a checkpoint's pieces, with LoRA added.

A row is an entry of a tensor's first dimension; a scalar has one. Of each tensor all rows are read once and in order, so
that what is read can be checked and hashed on the way, and a block is all that has to be in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from megadiff.parallel.plan import LORA_A, LORA_B
from megadiff.tensors.fingerprint import StreamingFingerprint
from megadiff.tensors.shards import Piece, ShardFolder
from megadiff.tensors.tensor_file import TensorFile, TensorMeta

LEAST_MAPPED = 1 << 20  # bytes; less is sooner read than mapped
BLOCK_BYTES = 32 << 20  # or one row; smaller blocks are hashed at half the speed


@dataclass(frozen=True, kw_only=True)
class Rows:
    """A block: rows begin … end of a tensor."""

    name: str
    begin: int
    end: int
    shape: tuple[int, ...]  # of the block, at least one dimension
    is_last: bool


class Room:
    """Memory for one block's tensors, used again for a later block: fresh pages cost as much as a copy."""

    def __init__(self) -> None:
        self._buffer = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
        self._used = 0

    def clear(self) -> None:
        self._used = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor, here where it fits."""
        size = math.prod(shape) * dtype.itemsize
        if self._used + size > len(self._buffer):
            return torch.empty(shape, dtype=dtype)
        begin, self._used = self._used, self._used + -(-size // 64) * 64
        return self._buffer[begin : begin + size].view(dtype).view(*shape)


class RowSource(Protocol):
    """tensors: name → dtype and shape of the full tensor."""

    tensors: Mapping[str, TensorMeta]

    def cuts(self, name: str) -> Sequence[int]:
        """Rows at which a block had better begin."""

    def read(self, block: Rows, room: Room) -> Tensor:
        """The block's rows, contiguous, not to be written to; their memory may be the room's. Raises ValueError for damage,
        at the latest with the tensor's last block."""

    def file_of(self, name: str) -> str:
        """The file or folder that a message about the tensor names."""


def row_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """A tensor's shape with at least one dimension."""
    return tuple(shape) or (1,)


def row_blocks(
    name: str, shape: Sequence[int], *, itemsize: int, cuts: Sequence[int] = ()
) -> Iterator[Rows]:
    """Blocks of at most BLOCK_BYTES, or of one row; none of a tensor without elements. cuts: rows that begin a block."""
    num_rows, *rest = row_shape(shape)
    size = max(BLOCK_BYTES // (max(math.prod(rest), 1) * itemsize), 1)
    if not math.prod(shape):
        return
    edges = sorted({0, num_rows, *(cut for cut in cuts if 0 < cut < num_rows)})
    for start, stop in pairwise(edges):
        for begin in range(start, stop, size):
            end = min(begin + size, stop)
            yield Rows(
                name=name, begin=begin, end=end, shape=(end - begin, *rest), is_last=end == num_rows
            )


def whole(source: RowSource, name: str) -> Tensor:
    """A small tensor in one piece, in memory of its own."""
    shape = row_shape(source.tensors[name].shape)
    block = Rows(name=name, begin=0, end=shape[0], shape=shape, is_last=True)
    return source.read(block, Room()).clone().view(source.tensors[name].shape)


class FileRows:
    """Tensors of safetensors files. keys: name → (file, name in the file)."""

    def __init__(self, keys: Mapping[str, tuple[TensorFile, str]]) -> None:
        self._keys = dict(keys)
        self.tensors = {name: file.tensors[key] for name, (file, key) in self._keys.items()}

    def cuts(self, name: str) -> Sequence[int]:
        return ()

    def read(self, block: Rows, room: Room) -> Tensor:
        file, key = self._keys[block.name]
        return _read(file, key, first_row=block.begin, shape=block.shape, room=room)

    def file_of(self, name: str) -> str:
        return str(self._keys[name][0].path)


class ShardRows:
    """Tensors of a checkpoint. keys: name → name in the checkpoint. Every piece is checked by its fingerprint."""

    def __init__(self, folder: ShardFolder, keys: Mapping[str, str]) -> None:
        self._folder, self._keys = folder, dict(keys)
        self.tensors = {
            name: TensorMeta(dtype=_dtype(folder.pieces[key]), shape=folder.shapes[key])
            for name, key in self._keys.items()
        }
        self._current: list[_PieceReader] = []  # of the tensor whose blocks are being read

    def cuts(self, name: str) -> Sequence[int]:
        return [_begin(piece)[0] for piece in self._folder.pieces[self._keys[name]]]

    def read(self, block: Rows, room: Room) -> Tensor:
        if block.begin == 0:
            self._current = [
                _PieceReader(piece) for piece in self._folder.pieces[self._keys[block.name]]
            ]
        parts = [part for reader in self._current if (part := reader.read(block, room))]
        if block.is_last:
            for reader in self._current:
                reader.check()
        if len(parts) == 1:
            return parts[0][1]
        rows = room.take(block.shape, self.tensors[block.name].dtype)
        for place, data in parts:
            rows[place].copy_(data)
        return rows

    def file_of(self, name: str) -> str:
        return str(self._folder.folder)


class MergedRows:
    """W + scale · B A where lora has A and B of a module, computed in float32; the base's other tensors as they are.

    lora: the tensors `<module>.lora_A.weight` [rank, in] and `<module>.lora_B.weight` [out, rank].
    merged: name of a tensor that has LoRA added → its module.
    """

    def __init__(self, base: RowSource, lora: RowSource, *, scale: float) -> None:
        self._base, self._lora, self._scale = base, lora, scale
        self.merged = {f"{_module(name)}.weight": _module(name) for name in lora.tensors}
        self.tensors = {
            name: TensorMeta(dtype=torch.float32, shape=meta.shape) if name in self.merged else meta
            for name, meta in base.tensors.items()
        }
        self._pair: tuple[str, Tensor, Tensor] | None = None

    def cuts(self, name: str) -> Sequence[int]:
        return self._base.cuts(name)

    def read(self, block: Rows, room: Room) -> Tensor:
        held = self._base.read(block, room)
        if block.name not in self.merged:
            return held
        a, b = self._read_pair(self.merged[block.name])
        return torch.addmm(held.float(), b[block.begin : block.end], a, alpha=self._scale)

    def file_of(self, name: str) -> str:
        return self._base.file_of(name)

    def _read_pair(self, module: str) -> tuple[Tensor, Tensor]:
        if not self._pair or self._pair[0] != module:
            a, b = (whole(self._lora, f"{module}.{part}").float() for part in (LORA_A, LORA_B))
            self._pair = (module, a, b)
        return self._pair[1:]


class JoinedRows:
    """Several sources in one, each under its own prefix, which is put before its tensors' names."""

    def __init__(self, sources: Mapping[str, RowSource]) -> None:
        self._places = {
            f"{prefix}{name}": (rows, name)
            for prefix, rows in sources.items()
            for name in rows.tensors
        }
        self.tensors = {name: rows.tensors[key] for name, (rows, key) in self._places.items()}

    def cuts(self, name: str) -> Sequence[int]:
        rows, key = self._places[name]
        return rows.cuts(key)

    def read(self, block: Rows, room: Room) -> Tensor:
        rows, key = self._places[block.name]
        return rows.read(replace(block, name=key), room)

    def file_of(self, name: str) -> str:
        rows, key = self._places[name]
        return rows.file_of(key)


class _PieceReader:
    """One piece, read from its first row to its last."""

    def __init__(self, piece: Piece) -> None:
        self._piece = piece
        self._digits = StreamingFingerprint(
            piece.file.tensors[piece.key].dtype, piece.place.local_shape
        )

    def read(self, block: Rows, room: Room) -> tuple[tuple[slice, ...], Tensor] | None:
        """What the piece has of the block: where it lies in the block's rows, and the data; None for nothing."""
        (first, *columns_at), (num_rows, *columns) = (
            _begin(self._piece),
            row_shape(self._piece.place.local_shape),
        )
        start, stop = max(first, block.begin), min(first + num_rows, block.end)
        if start >= stop or not math.prod(columns):
            return None
        shape = (stop - start, *columns)
        data = _read(
            self._piece.file, self._piece.key, first_row=start - first, shape=shape, room=room
        )
        self._digits.update(data.view(-1).view(torch.uint8))
        within = (slice(at, at + size) for at, size in zip(columns_at, columns, strict=True))
        return (slice(start - block.begin, stop - block.begin), *within), data

    def check(self) -> None:
        self._piece.check(self._digits.digits())


def _read(
    file: TensorFile, key: str, *, first_row: int, shape: Sequence[int], room: Room
) -> Tensor:
    """Rows of a tensor of a file: in the file's own pages where they can be mapped, which saves a copy, else in the room."""
    dtype = file.tensors[key].dtype
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    offset, num_bytes = first_row * row_bytes, shape[0] * row_bytes
    pages = (
        file.mapped(key, offset=offset, num_bytes=num_bytes) if num_bytes >= LEAST_MAPPED else None
    )
    if pages is not None:
        return pages.view(dtype).view(*shape)
    rows = room.take(shape, dtype)
    file.read_into(key, rows, offset=offset)
    return rows


def _begin(piece: Piece) -> tuple[int, ...]:
    """Where the piece begins, with at least one dimension."""
    return tuple(piece.place.offsets) or (0,)


def _module(lora_name: str) -> str:
    return lora_name.rsplit(".", 2)[0]


def _dtype(pieces: Sequence[Piece]) -> torch.dtype:
    """Raises ValueError when the pieces of a tensor have several."""
    dtypes = {piece.file.tensors[piece.key].dtype for piece in pieces}
    if len(dtypes) > 1:
        raise ValueError(
            f"{pieces[0].file.path}: {pieces[0].place.tensor!r} has pieces of {' and '.join(sorted(map(str, dtypes)))}"
        )
    return dtypes.pop()
