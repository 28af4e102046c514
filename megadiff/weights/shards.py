"""Tensors on disk, read by slice: a checkpoint's per-rank shard files, and the diffusers folders weights start from.

A shard file is plain safetensors; what no safetensors field says (which tensor a piece is of and where it lies in it, its
checksum) is JSON in the header's metadata. Pieces carry their place, so that any layout can read what any other has
written. The first piece of a tensor in a file has the tensor's name there, a further one NAME#1, NAME#2, …
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from megadiff.models.files import open_weights, weight_files

METADATA_KEY = "megadiff"
TRAINED, AVERAGED = "model", "average"  # the kinds of weights in a checkpoint: names are KIND/COMPONENT.NAME
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


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


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
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


def _row_boxes(shape: tuple[int, ...], row: int, start: int, stop: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    begin = row * math.prod(shape[1:])
    for offsets, sizes in _boxes(shape[1:], start - begin, stop - begin):
        yield (row, *offsets), (1, *sizes)


def shard_file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}.safetensors"


def write_shards(
    folder: Path,
    shards: Mapping[str, Sequence[Shard]],
    *,
    rank: int,
    num_files: int,
    values: Mapping[str, object] | None = None,
) -> None:
    """Write one rank's pieces, one by one, so that only one is copied to host memory at a time.

    Every rank of num_files writes a file, be it empty, so that a lost one is noticed. A piece that several ranks hold
    is written by one of them. values: JSON, the same on every rank.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pieces = {
        f"{name}#{index}" if index else name: (name, piece)
        for name, pieces in shards.items()
        for index, piece in enumerate(pieces)
    }
    with open(shard_file(folder, rank), "wb") as file:
        checksums = dict.fromkeys(pieces, "00000000")  # as wide as the real ones, which are known when all is written
        header = _header(pieces, checksums, num_files, values or {})
        file.write(header)
        for key, (_, piece) in pieces.items():
            data = _bytes(piece.local)
            checksums[key] = _checksum(data)
            file.write(data)
        file.seek(0)
        file.write(_header(pieces, checksums, num_files, values or {}))
        file.flush()
        os.fsync(file.fileno())


class ShardFolder:
    """The shard files of a checkpoint, as the full tensors that they make up.

    values: what write_shards was given. shapes: name → shape of the full tensor. Raises ValueError, naming the file and
    where it can the tensor, when a file is missing, truncated or no shard file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        first = _read_header(shard_file(self.folder, 0))
        self.values: dict[str, object] = first["values"]
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._pieces: dict[str, list[tuple[Path, str, dict]]] = {}
        self._open: dict[Path, safe_open] = {}
        self._last: tuple[Path, str, Tensor] | None = None  # the piece read last: boxes of one range often share it
        for rank in range(first["num_files"]):
            file = shard_file(self.folder, rank)
            header = first if rank == 0 else _read_header(file)
            for key, piece in header["tensors"].items():
                name = piece.get("tensor", key)  # not there in files from when a file held one piece of a tensor
                self.shapes[name] = tuple(piece["shape"])
                self._pieces.setdefault(name, []).append((file, key, piece))

    def read_into(self, name: str, shard: Shard) -> None:
        """Fill shard.local, bit for bit, from whichever pieces overlap it. Each piece read is checked whole."""
        if name not in self._pieces:
            raise ValueError(f"{self.folder} holds no tensor {name!r}; another model or engine wrote it")
        if self.shapes[name] != shard.shape:
            raise ValueError(
                f"{self.folder}: {name!r} has shape {self.shapes[name]}, but this model's is {shard.shape}; "
                "load it with the model that wrote it"
            )
        num_copied = 0
        for file, key, piece in self._pieces[name]:
            overlap = _overlap(piece["offsets"], piece["local_shape"], shard.offsets, shard.local.shape)
            if overlap is None:
                continue
            of_piece, of_shard = overlap
            source = self._read_piece(file, key, piece)
            if source.dtype != shard.local.dtype:
                raise ValueError(f"{file}: {name!r} is {source.dtype}, but this engine holds it as {shard.local.dtype}")
            shard.local[of_shard].copy_(source[of_piece])
            num_copied += source[of_piece].numel()
        if num_copied != shard.local.numel():
            raise ValueError(
                f"{self.folder}: {num_copied} of the {shard.local.numel()} elements of {name!r} are in its files; "
                "the checkpoint is incomplete, use the one before"
            )

    def _read_piece(self, file: Path, key: str, piece: dict) -> Tensor:
        if self._last and self._last[:2] == (file, key):
            return self._last[2]
        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt")
        tensor = self._open[file].get_tensor(key)
        if _checksum(_bytes(tensor)) != piece["crc32"]:
            raise ValueError(f"{file}: tensor {key!r} does not match its checksum; the file is corrupt")
        self._last = (file, key, tensor)
        return tensor


class SourceFolder:
    """The weights of one diffusers component: one safetensors file, or several with an index.

    Raises ValueError when there are no weights, an indexed file is missing, or one is not whole.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        files = [open_weights(path) for path in weight_files(self.folder)]
        self._file_of = {name: file for file in files for name in file.keys()}

    def check_names(self, shapes: Mapping[str, tuple[int, ...]], *, of: str = "its config.json") -> None:
        """Raises ValueError that names what is missing, extra or of another shape than the parameters of a model, `of`."""
        problems = [f"missing {name}" for name in sorted(set(shapes) - set(self._file_of))]
        problems += [f"not in the model: {name}" for name in sorted(set(self._file_of) - set(shapes))]
        for name in sorted(set(shapes) & set(self._file_of)):
            shape = tuple(self._file_of[name].get_slice(name).get_shape())
            if shape != tuple(shapes[name]):
                problems.append(f"{name} has shape {shape}, the model's is {tuple(shapes[name])}")
        if problems:
            more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
            raise ValueError(f"{self.folder} does not fit {of}: {'; '.join(problems[:8])}{more}")

    def read_into(self, name: str, shard: Shard) -> None:
        """Fill shard.local with its part of the tensor, cast to the shard's dtype. Reads nothing else of the file."""
        place = tuple(slice(at, at + size) for at, size in zip(shard.offsets, shard.local.shape, strict=True))
        if shard.local.numel():
            shard.local.copy_(self._file_of[name].get_slice(name)[place])


def _header(
    pieces: Mapping[str, tuple[str, Shard]], checksums: Mapping[str, str], num_files: int, values: Mapping[str, object]
) -> bytes:
    """Length and JSON of a safetensors header; its length does not depend on the checksums."""
    tensors, places, end = {}, {}, 0
    for key, (name, shard) in pieces.items():
        begin, end = end, end + shard.local.numel() * shard.local.element_size()
        local_shape = list(shard.local.shape)
        tensors[key] = {"dtype": DTYPE_NAMES[shard.local.dtype], "shape": local_shape, "data_offsets": [begin, end]}
        places[key] = {
            "tensor": name,
            "shape": list(shard.shape),
            "offsets": list(shard.offsets),
            "local_shape": local_shape,
            "crc32": checksums[key],
        }
    index = json.dumps({"num_files": num_files, "values": dict(values), "tensors": places})
    text = json.dumps({"__metadata__": {METADATA_KEY: index}, **tensors}).encode()
    text += b" " * (-len(text) % 8)  # tensors begin aligned
    return struct.pack("<Q", len(text)) + text


def _read_header(file: Path) -> dict:
    """The JSON of a shard file, after a check that all the tensors it announces are there."""
    if not file.is_file():
        raise ValueError(f"{file} is missing; the checkpoint is incomplete, use the one before")
    size = file.stat().st_size
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        text = stream.read(length) if 8 + length <= size else b""
    try:
        header = json.loads(text)
        index = json.loads(header["__metadata__"][METADATA_KEY])
    except (ValueError, KeyError) as error:
        raise ValueError(f"{file} ({size} bytes) has no intact shard header; it is truncated or corrupt") from error
    for name in index["tensors"]:
        end = 8 + length + header[name]["data_offsets"][1]
        if end > size:
            raise ValueError(f"{file} is truncated: tensor {name!r} ends at byte {end}, the file at {size}")
    return index


def _overlap(piece_at, piece_shape, wanted_at, wanted_shape) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Where two boxes of one tensor meet, as slices of each; None when they do not."""
    of_piece, of_wanted = [], []
    for p_at, p_size, w_at, w_size in zip(piece_at, piece_shape, wanted_at, wanted_shape, strict=True):
        begin, end = max(p_at, w_at), min(p_at + p_size, w_at + w_size)
        if begin >= end:
            return None
        of_piece.append(slice(begin - p_at, end - p_at))
        of_wanted.append(slice(begin - w_at, end - w_at))
    return tuple(of_piece), tuple(of_wanted)


def _bytes(tensor: Tensor) -> memoryview:
    """The tensor's bytes on the host, without a copy where it is there already."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")


def _checksum(data: memoryview) -> str:
    return f"{zlib.crc32(data):08x}"
