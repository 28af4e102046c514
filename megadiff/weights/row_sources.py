"""Full tensors that come as blocks of rows: from safetensors files, from a checkpoint's pieces, with LoRA added.

A row is an entry of a tensor's first dimension; a scalar has one. Of each tensor all rows are read once and in order, so
that what is read can be checked and hashed on the way, and a block is all that has to be in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megadiff.parallel.plan import LORA_A, LORA_B
from megadiff.weights.fingerprint import StreamingFingerprint
from megadiff.weights.shards import Piece, ShardFolder, incomplete
from megadiff.weights.tensor_file import TensorFile, TensorMeta

BLOCK_BYTES = 32 << 20  # or one row; smaller blocks are hashed at half the speed


Finish = Callable[[], None]


class RowSource(Protocol):
    """tensors: name → dtype and shape of the full tensor."""

    tensors: Mapping[str, TensorMeta]

    def fetch(self, name: str, begin: int, rows: Tensor) -> Finish:
        """Read rows begin … begin + n of the tensor; what it returns, called later, completes rows [n, …] (contiguous).

        So one thread can read while another computes. Both are called in the order of the rows, finish in one thread. Both
        raise ValueError for damage, at the latest with the last row.
        """

    def file_of(self, name: str) -> str:
        """The file or folder that a message about the tensor names."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """A block: rows begin … end of a tensor."""

    name: str
    begin: int
    end: int
    shape: tuple[int, ...]  # of the block, at least one dimension
    is_last: bool


def row_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """A tensor's shape with at least one dimension."""
    return tuple(shape) or (1,)


def row_blocks(name: str, shape: Sequence[int], *, itemsize: int) -> Iterator[Rows]:
    """Blocks of at most BLOCK_BYTES, or of one row; none of a tensor without elements."""
    num_rows, *rest = row_shape(shape)
    size = max(BLOCK_BYTES // (max(math.prod(rest), 1) * itemsize), 1)
    if not math.prod(shape):
        return
    for begin in range(0, num_rows, size):
        end = min(begin + size, num_rows)
        yield Rows(name=name, begin=begin, end=end, shape=(end - begin, *rest), is_last=end == num_rows)


def whole(source: RowSource, name: str) -> Tensor:
    """A small tensor in one piece."""
    meta = source.tensors[name]
    tensor = torch.empty(meta.shape, dtype=meta.dtype)
    if tensor.numel():
        source.fetch(name, 0, tensor.view(row_shape(meta.shape)))()
    return tensor


class FileRows:
    """Tensors of safetensors files. keys: name → (file, name in the file)."""

    def __init__(self, keys: Mapping[str, tuple[TensorFile, str]]) -> None:
        self._keys = dict(keys)
        self.tensors = {name: file.tensors[key] for name, (file, key) in self._keys.items()}

    def fetch(self, name: str, begin: int, rows: Tensor) -> Finish:
        file, key = self._keys[name]
        file.read_into(key, rows, offset=begin * rows[0].nbytes)
        return _nothing

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
        self._current: list[_PieceReader] = []  # of the tensor whose rows are being fetched

    def fetch(self, name: str, begin: int, rows: Tensor) -> Finish:
        if begin == 0:
            self._current = [_PieceReader(piece) for piece in self._folder.pieces[self._keys[name]]]
        readers, parts = self._current, []
        for reader in readers:
            parts += reader.fetch(begin, rows)
        num_found = sum(part.data.numel() for part in parts)
        if num_found != rows.numel():
            raise incomplete(self._folder.folder, self._keys[name], found=num_found, wanted=rows.numel())
        is_last = begin + len(rows) == row_shape(self.tensors[name].shape)[0]

        def finish() -> None:
            for part in parts:
                part.finish()
            for reader in readers if is_last else ():
                reader.check()

        return finish

    def file_of(self, name: str) -> str:
        return str(self._folder.folder)


class MergedRows:
    """W + scale · B A where lora has A and B of a module, computed in float32; the base's other tensors as they are.

    lora: the tensors `<module>.lora_A.weight` [rank, in] and `<module>.lora_B.weight` [out, rank].
    """

    def __init__(self, base: RowSource, lora: RowSource, *, scale: float) -> None:
        self._base, self._lora, self._scale = base, lora, scale
        self._merged = {f"{_module(name)}.weight": _module(name) for name in lora.tensors}
        self.tensors = {
            name: TensorMeta(dtype=torch.float32, shape=meta.shape) if name in self._merged else meta
            for name, meta in base.tensors.items()
        }
        self._pair: tuple[str, Tensor, Tensor] | None = None

    def fetch(self, name: str, begin: int, rows: Tensor) -> Finish:
        if name not in self._merged:
            return self._base.fetch(name, begin, rows)
        held = torch.empty(rows.shape, dtype=self._base.tensors[name].dtype)
        finish_base = self._base.fetch(name, begin, held)
        a, b = self._read_pair(self._merged[name])

        def finish() -> None:
            finish_base()
            torch.addmm(held.float(), b[begin : begin + len(rows)], a, alpha=self._scale, out=rows)

        return finish

    def file_of(self, name: str) -> str:
        return self._base.file_of(name)

    def _read_pair(self, module: str) -> tuple[Tensor, Tensor]:
        if not self._pair or self._pair[0] != module:
            a, b = (whole(self._lora, f"{module}.{part}").float() for part in (LORA_A, LORA_B))
            self._pair = (module, a, b)
        return self._pair[1:]


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


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Rows of a piece that were read. data: they, contiguous. target: where they belong; data itself where it can be."""

    digits: StreamingFingerprint
    data: Tensor
    target: Tensor

    def finish(self) -> None:
        self.digits.update(self.data.view(-1).view(torch.uint8))
        if self.data is not self.target:
            self.target.copy_(self.data)


class _PieceReader:
    """One piece, read from its first row to its last."""

    def __init__(self, piece: Piece) -> None:
        self._piece = piece
        self._digits = StreamingFingerprint(piece.file.tensors[piece.key].dtype, piece.place.local_shape)

    def fetch(self, begin: int, rows: Tensor) -> list[_Part]:
        """What the piece has of rows begin … of the full tensor: one part, or none."""
        place = self._piece.place
        (first, *columns_at), (num_rows, *columns) = tuple(place.offsets) or (0,), row_shape(place.local_shape)
        start, stop = max(first, begin), min(first + num_rows, begin + len(rows))
        if start >= stop or not math.prod(columns):
            return []
        within = (slice(at, at + size) for at, size in zip(columns_at, columns, strict=True))
        target = rows[(slice(start - begin, stop - begin), *within)]
        data = target if target.is_contiguous() else torch.empty(target.shape, dtype=rows.dtype)
        self._piece.file.read_into(self._piece.key, data, offset=(start - first) * data[0].nbytes)
        return [_Part(digits=self._digits, data=data, target=target)]

    def check(self) -> None:
        self._piece.check(self._digits.digits())


def _nothing() -> None:
    pass
