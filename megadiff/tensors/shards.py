"""Tensors on disk, read by slice: a checkpoint's per-rank shard files, and the diffusers folders weights start from.

A shard file is plain safetensors; what no safetensors field says (which tensor a piece is of and where it lies in it, its
fingerprint) is JSON in the header's metadata. Pieces carry their place, so that any layout can read what any other has
written. The first piece of a tensor in a file has the tensor's name there, a further one NAME#1, NAME#2, …

Fingerprints cover the tensors' bytes, the header's seal covers the header: no bit is just trusted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megadiff.tensors.covering import cover
from megadiff.tensors.fingerprint import fingerprint
from megadiff.tensors.model_files import open_weights, parse_json, weight_files
from megadiff.tensors.seals import SEAL_KEY, UNSEALED
from megadiff.tensors.tensor_file import TensorFile, TensorMeta, TensorWriter, reserve_descriptors

SHARD_SUFFIX = ".safetensors"
METADATA_KEY = "megadiff"
FORMAT = 4  # of that JSON
UNKNOWN = "0" * 16  # a fingerprint before it is known: as wide as any
TRAINED, AVERAGED = (
    "model",
    "average",
)  # the kinds of weights in a checkpoint: names are KIND/COMPONENT.NAME


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A piece of a tensor. local: the piece. offsets: where it begins in the full tensor. shape: the full tensor's."""

    local: Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


def flat_shards(flat: Tensor, start: int, box: Shard) -> list[Shard]:
    """Pieces that make up a contiguous range of a box, sharing the range's memory.

    flat: 1-D, elements start … start + numel of the row-major box. box: where the box lies in its full tensor; its
    `local` gives the box's shape only (a meta tensor will do). At most 2·ndim − 1 pieces: the end of a row, whole rows,
    the beginning of a row.
    """
    shards, at = [], 0
    for offsets, shape in _boxes(tuple(box.local.shape), start, start + flat.numel()):
        size = math.prod(shape)
        place = tuple(begin + offset for begin, offset in zip(box.offsets, offsets, strict=True))
        shards.append(Shard(local=flat[at : at + size].view(shape), offsets=place, shape=box.shape))
        at += size
    return shards


def _boxes(
    shape: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offsets, shape) of the boxes that elements start … stop of a row-major array are made of, in their order."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield (start,) * len(shape), (stop - start,) * len(shape)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # the range lies within a row
        yield from _row_boxes(shape, last, start, stop)
        return
    yield from _row_boxes(shape, first - 1, start, first * row)
    if first < last:
        yield (first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:])
    yield from _row_boxes(shape, last, last * row, stop)


def _row_boxes(
    shape: tuple[int, ...], row: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], ...]]:
    begin = row * math.prod(shape[1:])
    for offsets, sizes in _boxes(shape[1:], start - begin, stop - begin):
        yield (row, *offsets), (1, *sizes)


def shard_file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}{SHARD_SUFFIX}"


@dataclass(frozen=True, kw_only=True)
class PiecePlace:
    """A piece in a shard file. tensor: whose it is. shape: that tensor's. offsets, local_shape: the piece's box in it."""

    tensor: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    local_shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A piece that can be read: `key` is its name in the file."""

    file: TensorFile
    key: str
    place: PiecePlace
    fingerprint: str

    def check(self, found: str) -> None:
        """Raises ValueError when the piece's bytes have another fingerprint than was written."""
        if found != self.fingerprint:
            raise ValueError(
                f"{self.file.path}: tensor {self.key!r} does not match its fingerprint; the file is corrupt"
            )


def piece_keys(places: Sequence[PiecePlace]) -> dict[str, PiecePlace]:
    """Names in a file: the tensor's, and with a number behind it for its further pieces."""
    keys: dict[str, PiecePlace] = {}
    count: dict[str, int] = {}
    for place in places:
        index = count[place.tensor] = count.get(place.tensor, -1) + 1
        keys[f"{place.tensor}#{index}" if index else place.tensor] = place
    return keys


class ShardWriter:
    """One rank's file of pieces, which may be written in parts. close() takes their fingerprints. Raises OSError."""

    def __init__(
        self,
        folder: Path,
        pieces: Mapping[str, tuple[PiecePlace, TensorMeta]],
        *,
        rank: int,
        num_files: int,
        values: Mapping[str, object],
    ) -> None:
        """pieces: key (as of piece_keys) → place and dtype. values: JSON, the same on every rank."""
        self._places = {key: place for key, (place, _) in pieces.items()}
        self._num_files, self._values = num_files, dict(values)
        tensors = {key: meta for key, (_, meta) in pieces.items()}
        metadata = self._metadata(dict.fromkeys(pieces, UNKNOWN))
        self.file = TensorWriter(shard_file(folder, rank), tensors, metadata=metadata)

    def close(self, fingerprints: Mapping[str, str], *, sync: bool = False) -> None:
        """sync: the file is on the disk when this returns."""
        self.file.close(metadata=self._metadata(fingerprints), sync=sync)

    def _metadata(self, fingerprints: Mapping[str, str]) -> dict[str, str]:
        pieces = {
            key: {
                "tensor": place.tensor,
                "shape": place.shape,
                "offsets": place.offsets,
                "local_shape": place.local_shape,
                "fingerprint": fingerprints[key],
            }
            for key, place in self._places.items()
        }
        index = {
            "format": FORMAT,
            "num_files": self._num_files,
            "values": self._values,
            "tensors": pieces,
        }
        return {METADATA_KEY: json.dumps(index), SEAL_KEY: UNSEALED}


def write_shards(
    folder: Path,
    shards: Mapping[str, Sequence[Shard]],
    *,
    rank: int,
    num_files: int,
    values: Mapping[str, object] | None = None,
) -> None:
    """Write one rank's pieces in float32, one by one, so that only one is copied to host memory at a time. In whatever dtype
    frozen weights are held, a checkpoint is the same: whichever components were trained.

    Every rank of num_files writes a file, be it empty, so that a lost one is noticed. A piece that several ranks hold
    is written by one of them. values: JSON, the same on every rank.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = [
        (_place_of(name, shard), shard.local)
        for name, shards_of in shards.items()
        for shard in shards_of
    ]
    keys = piece_keys([place for place, _ in found])
    tensors = dict(zip(keys, (local for _, local in found), strict=True))
    pieces = {
        key: (place, TensorMeta(dtype=torch.float32, shape=place.local_shape))
        for key, place in keys.items()
    }
    writer = ShardWriter(folder, pieces, rank=rank, num_files=num_files, values=values or {})
    digits = {}
    for key, tensor in tensors.items():
        on_host = tensor.detach().to("cpu", torch.float32).contiguous()
        digits[key] = fingerprint(on_host)
        writer.file.write(key, on_host)
    writer.close(digits, sync=True)


def _place_of(name: str, shard: Shard) -> PiecePlace:
    return PiecePlace(
        tensor=name, shape=shard.shape, offsets=shard.offsets, local_shape=tuple(shard.local.shape)
    )


class ShardFolder:
    """The shard files of a checkpoint, as the full tensors that they make up.

    values: what write_shards was given. shapes: name → shape of the full tensor. pieces: name → its
    pieces, which are disjoint and cover it. num_files: of as many ranks. Raises ValueError, naming
    the file and where it can the tensor, when a file is missing, damaged or of another checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        file, index = _read_index(shard_file(self.folder, 0))
        self.values: dict[str, object] = index["values"]
        self.num_files: int = index["num_files"]
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.pieces: dict[str, list[Piece]] = {}
        self._last: tuple[Piece, Tensor] | None = (
            None  # the piece read last: boxes of one range often share it
        )
        reserve_descriptors(self.num_files, what=f"{self.folder}, a file for each rank,")
        for rank in range(self.num_files):
            if rank:
                file, index = _read_index(shard_file(self.folder, rank))
                self._check_index(file, index)
            for piece in _pieces(file, index):
                self._add(piece)
        for name, pieces in self.pieces.items():
            _check_cover(self.folder, name, pieces)

    def _check_index(self, file: TensorFile, index: Mapping[str, object]) -> None:
        for key, expected in (("num_files", self.num_files), ("values", self.values)):
            if index[key] != expected:
                raise ValueError(
                    f"{file.path} has {key}={index[key]!r:.200}, but that of rank 0 has "
                    f"{expected!r:.200}; they are of two checkpoints, use the one before"
                )

    def _add(self, piece: Piece) -> None:
        tensor, shape = piece.place.tensor, piece.place.shape
        known = self.shapes.setdefault(tensor, shape)
        if known != shape:
            raise ValueError(
                f"{piece.file.path} is corrupt: {tensor!r} has shape {shape}, and {known} elsewhere"
            )
        self.pieces.setdefault(tensor, []).append(piece)

    def read_into(self, name: str, shard: Shard) -> None:
        """Fill shard.local, bit for bit, from whichever pieces overlap it. Each piece read is checked whole."""
        if name not in self.pieces:
            raise ValueError(
                f"{self.folder} holds no tensor {name!r}; another model or engine wrote it"
            )
        if self.shapes[name] != shard.shape:
            raise ValueError(
                f"{self.folder}: {name!r} has shape {self.shapes[name]}, but this model's is {shard.shape}; "
                "load it with the model that wrote it"
            )
        for piece in self.pieces[name]:
            overlap = _overlap(
                piece.place.offsets, piece.place.local_shape, shard.offsets, shard.local.shape
            )
            if overlap is None:
                continue
            of_piece, of_shard = overlap
            source = self._read_piece(piece)
            if source.dtype != shard.local.dtype:
                raise ValueError(
                    f"{piece.file.path}: {name!r} is {source.dtype}, but this engine holds it as {shard.local.dtype}"
                )
            shard.local[of_shard].copy_(source[of_piece])

    def _read_piece(self, piece: Piece) -> Tensor:
        if self._last and self._last[0] is piece:
            return self._last[1]
        tensor = piece.file.tensor(piece.key)
        piece.check(fingerprint(tensor))
        self._last = (piece, tensor)
        return tensor


def _check_cover(folder: Path, name: str, pieces: Sequence[Piece]) -> None:
    """Raise ValueError unless the pieces are disjoint and cover their tensor."""
    shape = pieces[0].place.shape
    if cover(((piece.place.offsets, piece.place.local_shape) for piece in pieces), shape):
        return
    num_stored = sum(math.prod(piece.place.local_shape) for piece in pieces)
    num_wanted = math.prod(shape)
    if num_stored < num_wanted:
        raise ValueError(
            f"{folder}: {num_stored} of the {num_wanted} elements of {name!r} are in its files; "
            "the checkpoint is incomplete, use the one before"
        )
    raise ValueError(
        f"{folder}: the {len(pieces)} pieces of {name!r}, of {num_stored} elements in all, do not "
        f"cover its {num_wanted} elements once each; the checkpoint is corrupt, use the one before"
    )


class SourceFolder:
    """The weights of one diffusers component: one safetensors file, or several with an index.

    Raises ValueError when there are no weights, an indexed file is missing, or one is not whole.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        files = [open_weights(path) for path in weight_files(self.folder)]
        self._file_of = {name: file for file in files for name in file.keys()}

    def check_names(
        self, shapes: Mapping[str, tuple[int, ...]], *, of: str = "its config.json"
    ) -> None:
        """Raises ValueError that names what is missing, extra or of another shape than the parameters of a model, `of`."""
        problems = [f"missing {name}" for name in sorted(set(shapes) - set(self._file_of))]
        problems += [
            f"not in the model: {name}" for name in sorted(set(self._file_of) - set(shapes))
        ]
        for name in sorted(set(shapes) & set(self._file_of)):
            shape = tuple(self._file_of[name].get_slice(name).get_shape())
            if shape != tuple(shapes[name]):
                problems.append(f"{name} has shape {shape}, the model's is {tuple(shapes[name])}")
        if problems:
            more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
            raise ValueError(f"{self.folder} does not fit {of}: {'; '.join(problems[:8])}{more}")

    def read_into(self, name: str, shard: Shard) -> None:
        """Fill shard.local with its part of the tensor, cast to the shard's dtype. Reads nothing else of the file."""
        place = tuple(
            slice(at, at + size) for at, size in zip(shard.offsets, shard.local.shape, strict=True)
        )
        if shard.local.numel():
            shard.local.copy_(self._file_of[name].get_slice(name)[place])


def _read_index(path: Path) -> tuple[TensorFile, dict[str, Any]]:
    """A shard file and what its metadata says, after a check that all the tensors it announces are there."""
    if not path.is_file():
        raise ValueError(f"{path} is missing; the checkpoint is incomplete, use the one before")
    file = TensorFile(path)
    try:
        index = parse_json(file.metadata[METADATA_KEY])
        written_as = index.get("format", 1)
    except (ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is a safetensors file, but not one of a checkpoint") from error
    if written_as != FORMAT:
        raise ValueError(
            f"{path} has format {written_as}, this version of megadiff reads format {FORMAT}; use "
            "the one that wrote it"
        )
    kinds = {"num_files": int, "values": dict, "tensors": dict}
    odd = [key for key, kind in kinds.items() if type(index.get(key)) is not kind]
    if SEAL_KEY not in file.metadata or odd or index["num_files"] < 1:
        lacking = ", ".join(odd) or "seal, or no files"
        raise ValueError(f"{path} is corrupt: its metadata has no {lacking}")
    return file, index


def _pieces(file: TensorFile, index: Mapping[str, Any]) -> Iterator[Piece]:
    if index["tensors"].keys() != file.tensors.keys():
        raise ValueError(
            f"{file.path} is corrupt: its metadata lists other tensors than its header"
        )
    for key, entry in index["tensors"].items():
        try:
            box = _place(entry)
            written = str(entry["fingerprint"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{file.path} is corrupt: of {key!r} its metadata says {entry!r:.300}"
            ) from error
        if box.local_shape != file.tensors[key].shape:
            raise ValueError(
                f"{file.path} is corrupt: {key!r} has shape {file.tensors[key].shape} and "
                f"{box.local_shape}"
            )
        yield Piece(file=file, key=key, place=box, fingerprint=written)


def _place(entry: Mapping[str, Any]) -> PiecePlace:
    """Raise KeyError, TypeError or ValueError for an entry that is none."""
    box = PiecePlace(
        tensor=entry["tensor"],
        shape=tuple(entry["shape"]),
        offsets=tuple(entry["offsets"]),
        local_shape=tuple(entry["local_shape"]),
    )
    if not isinstance(box.tensor, str):
        raise ValueError(f"the tensor's name is {box.tensor!r}")
    for numbers in (box.shape, box.offsets, box.local_shape):
        if len(numbers) != len(box.shape) or any(type(number) is not int for number in numbers):
            raise ValueError(f"{numbers} are no {len(box.shape)} numbers")
    return box


def _overlap(
    piece_at, piece_shape, wanted_at, wanted_shape
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Where two boxes of one tensor meet, as slices of each; None when they do not."""
    of_piece, of_wanted = [], []
    for p_at, p_size, w_at, w_size in zip(
        piece_at, piece_shape, wanted_at, wanted_shape, strict=True
    ):
        begin, end = max(p_at, w_at), min(p_at + p_size, w_at + w_size)
        if begin >= end:
            return None
        of_piece.append(slice(begin - p_at, end - p_at))
        of_wanted.append(slice(begin - w_at, end - w_at))
    return tuple(of_piece), tuple(of_wanted)
