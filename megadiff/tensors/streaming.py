"""Tensors from a source to a sink, block by block: one thread reads, casts, cuts and hashes, the other writes.

What is in memory is a few blocks, however large the tensors are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from megadiff.tensors.fingerprint import StreamingFingerprint
from megadiff.tensors.layouts import Box
from megadiff.tensors.row_sources import Room, Rows, RowSource, row_blocks, row_shape
from megadiff.tensors.shards import PiecePlace, ShardWriter, piece_keys
from megadiff.tensors.tensor_file import TensorMeta, TensorWriter

AHEAD = 2  # blocks that are read before they are written

Advance = Callable[[int], object]  # is told the number of bytes written


@dataclass(frozen=True, kw_only=True)
class Part:
    """Bytes of a tensor of a file: data (contiguous), from byte `offset` on."""

    file: TensorWriter
    key: str
    offset: int
    data: Tensor


class Sink(Protocol):
    """tensors: name → dtype and shape, in the order in which they are best written."""

    tensors: Mapping[str, TensorMeta]

    def parts(self, block: Rows, rows: Tensor, room: Room) -> list[Part]:
        """What to write of the rows, which have the sink's dtype. Called with all blocks of a tensor in their order."""

    def close(self) -> None:
        """Called when all is written. Raises OSError."""

    def abandon(self) -> None:
        """Called instead of close() when something failed."""


def stream(
    source: RowSource, sink: Sink, *, advance: Advance, verify: bool, not_finite: set[str]
) -> dict[str, str]:
    """Fill the sink with the source's tensors, cast to its dtypes.

    verify: returns name → fingerprint of what the sink was given. not_finite: names of tensors that
    hold NaN or infinity then are added to it.
    Raises ValueError for a damaged source and OSError when the sink cannot be written.
    """
    expected = _Fingerprints(sink.tensors)
    rooms = [Room() for _ in range(AHEAD + 2)]
    pending: deque[Future[list[Part]]] = deque()
    pool = ThreadPoolExecutor(1, "convert")

    def prepare(block: Rows, room: Room) -> list[Part]:
        room.clear()
        rows = source.read(block, room).to(sink.tensors[block.name].dtype)
        if not _is_finite(rows):
            not_finite.add(block.name)
        if verify:
            expected.update(block, rows)
        return sink.parts(block, rows, room)

    try:
        for index, block in enumerate(_blocks(source, sink.tensors)):
            pending.append(pool.submit(prepare, block, rooms[index % len(rooms)]))
            if len(pending) > AHEAD:
                _write(pending.popleft().result(), advance)
        while pending:
            _write(pending.popleft().result(), advance)
        sink.close()
    except BaseException:
        pool.shutdown(cancel_futures=True)
        sink.abandon()
        raise
    pool.shutdown()
    return expected.digits()


def _is_finite(rows: Tensor) -> bool:
    """Tell whether there is no NaN and no infinity."""
    # A sum takes half the time that extremes take, and is finite when all is, but for an overflow.
    total = rows.sum(dtype=torch.float32)
    return bool(total.isfinite()) or all(bool(extreme.isfinite()) for extreme in rows.aminmax())


def fingerprints_of(source: RowSource, *, advance: Advance) -> dict[str, str]:
    """name → fingerprint of the source's tensors, which are read to the end."""
    found, room = _Fingerprints(source.tensors), Room()
    for block in _blocks(source, source.tensors):
        room.clear()
        rows = source.read(block, room)
        found.update(block, rows)
        advance(rows.nbytes)
    return found.digits()


class FileSink:
    """Safetensors files. files: name → tensors in their order; metadata: of each file."""

    def __init__(
        self,
        folder: Path,
        files: Mapping[str, Mapping[str, TensorMeta]],
        *,
        metadata: Mapping[str, Mapping[str, str]],
    ) -> None:
        self.tensors = {name: meta for tensors in files.values() for name, meta in tensors.items()}
        self._files: dict[str, TensorWriter] = {}
        with _abandoned_on_error(self):
            for file, tensors in files.items():
                self._files[file] = TensorWriter(folder / file, tensors, metadata=metadata[file])
        self._file_of = {
            name: self._files[file] for file, tensors in files.items() for name in tensors
        }

    def parts(self, block: Rows, rows: Tensor, room: Room) -> list[Part]:
        offset = block.begin * rows[0].nbytes
        return [Part(file=self._file_of[block.name], key=block.name, offset=offset, data=rows)]

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def abandon(self) -> None:
        for file in self._files.values():
            file.abandon()


class ShardSink:
    """A checkpoint's files, one a rank. boxes: of each rank, name → its box of the tensor. values: as of write_shards."""

    def __init__(
        self,
        folder: Path,
        tensors: Mapping[str, TensorMeta],
        boxes: Sequence[Mapping[str, Box]],
        *,
        values: Mapping[str, object],
    ) -> None:
        self.tensors = dict(tensors)
        self._writers: list[ShardWriter] = []
        self._places: dict[str, list[tuple[int, str, PiecePlace]]] = {name: [] for name in tensors}
        self._digits: list[dict[str, StreamingFingerprint]] = []
        with _abandoned_on_error(self):
            for rank, of_rank in enumerate(boxes):
                pieces = self._pieces(rank, of_rank)
                writer = ShardWriter(folder, pieces, rank=rank, num_files=len(boxes), values=values)
                self._writers.append(writer)

    def _pieces(
        self, rank: int, of_rank: Mapping[str, Box]
    ) -> dict[str, tuple[PiecePlace, TensorMeta]]:
        """Return key → place and dtype of what a rank's file holds; note which blocks go there."""
        places = [
            PiecePlace(
                tensor=name,
                shape=meta.shape,
                offsets=of_rank[name][0],
                local_shape=of_rank[name][1],
            )
            for name, meta in self.tensors.items()
            if name in of_rank
        ]
        pieces = {}
        digits = {}
        for key, box in piece_keys(places).items():
            meta = TensorMeta(dtype=self.tensors[box.tensor].dtype, shape=box.local_shape)
            pieces[key] = (box, meta)
            digits[key] = StreamingFingerprint(meta.dtype, meta.shape)
            self._places[box.tensor].append((rank, key, box))
        self._digits.append(digits)
        return pieces

    def parts(self, block: Rows, rows: Tensor, room: Room) -> list[Part]:
        parts = []
        for rank, key, place in self._places[block.name]:
            (first, *at), (num_rows, *sizes) = (
                tuple(place.offsets) or (0,),
                row_shape(place.local_shape),
            )
            start, stop = max(first, block.begin), min(first + num_rows, block.end)
            if start >= stop:
                continue
            columns = (slice(begin, begin + size) for begin, size in zip(at, sizes, strict=True))
            data = _contiguous(
                rows[(slice(start - block.begin, stop - block.begin), *columns)], room
            )
            self._digits[rank][key].update(data.view(-1).view(torch.uint8))
            offset = (start - first) * data[0].nbytes
            parts.append(Part(file=self._writers[rank].file, key=key, offset=offset, data=data))
        return parts

    def close(self) -> None:
        for writer, digits in zip(self._writers, self._digits, strict=True):
            writer.close({key: each.digits() for key, each in digits.items()})

    def abandon(self) -> None:
        for writer in self._writers:
            writer.file.abandon()


@contextmanager
def _abandoned_on_error(sink: Sink) -> Iterator[None]:
    """Close what a sink has opened when it cannot open the rest: cleaning up needs descriptors."""
    try:
        yield
    except BaseException:
        sink.abandon()
        raise


class _Fingerprints:
    """Of tensors that come as blocks."""

    def __init__(self, tensors: Mapping[str, TensorMeta]) -> None:
        self._tensors, self._found = tensors, {}
        self._open: StreamingFingerprint | None = None

    def update(self, block: Rows, rows: Tensor) -> None:
        if block.begin == 0:
            meta = self._tensors[block.name]
            self._open = StreamingFingerprint(meta.dtype, meta.shape)
        self._open.update(rows.reshape(-1).view(torch.uint8))
        if block.is_last:
            self._found[block.name] = self._open.digits()

    def digits(self) -> dict[str, str]:
        return self._found


def _blocks(source: RowSource, tensors: Mapping[str, TensorMeta]) -> Iterator[Rows]:
    for name in tensors:
        meta = source.tensors[name]
        yield from row_blocks(
            name, meta.shape, itemsize=meta.dtype.itemsize, cuts=source.cuts(name)
        )


def _contiguous(rows: Tensor, room: Room) -> Tensor:
    return rows if rows.is_contiguous() else room.take(rows.shape, rows.dtype).copy_(rows)


def _write(parts: list[Part], advance: Advance) -> None:
    for part in parts:
        part.file.write(part.key, part.data, offset=part.offset)
        advance(part.data.nbytes)
