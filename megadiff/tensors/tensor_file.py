"""Safetensors files by parts: any bytes of a tensor, read or mapped, and written anywhere.

The safetensors library maps whole files, whose pages then count as the process's own memory; here only what is looked at
is. A file that is written has its header first (`__metadata__` in front, compact JSON, padded with spaces to 8 bytes: as
the safetensors library and hence diffusers write it), then the tensors, one after another.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import resource
import struct
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megadiff.tensors.model_files import parse_json
from megadiff.tensors.seals import SEAL_KEY, check_seal, sealed

DTYPES_BY_NAME = {  # in the order in which the safetensors library puts tensors of several dtypes: it keeps them aligned
    "I64": torch.int64,
    "F64": torch.float64,
    "F32": torch.float32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I16": torch.int16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES_OF_DTYPES = {dtype: name for name, dtype in DTYPES_BY_NAME.items()}
SPARE_DESCRIPTORS = 64  # for all that a process opens beside
LENGTH_BYTES = 8  # of a header's length, in front of it
LARGEST_HEADER = 100_000_000  # bytes; the safetensors library refuses more
MADV_POPULATE_READ = 22  # Linux 5.14; an error where a page cannot be read, which on touching it would kill the process
LARGEST_READ = 1 << 30  # bytes in one call of the system, which takes 2 GiB at most


@dataclass(frozen=True, kw_only=True)
class TensorMeta:
    """What a header says of a tensor, but for its place."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFile:
    """A safetensors file, open for reading. tensors: in the order of their data. metadata: text by key.

    Opening reads the header and compares it with the file's size, and with its seal where it has
    one. Raises ValueError that names the file, what is wrong, and the tensor where it is about one.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        try:
            self._descriptor = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise ValueError(f"{self.path} cannot be read: {error.strerror}; restore it") from error
        self._close = weakref.finalize(self, os.close, self._descriptor)
        self.size = os.fstat(self._descriptor).st_size
        header, self._start = self._read_header()
        self.metadata: dict[str, str] = header.pop("__metadata__", {})
        self.tensors: dict[str, TensorMeta] = {}
        self._begins: dict[str, int] = {}
        self._read_tensors(header)

    def close(self) -> None:
        self._close()

    def read_into(self, name: str, data: Tensor, *, offset: int = 0) -> None:
        """Fill data (contiguous, any dtype) with the tensor's bytes from byte `offset` on."""
        view = tensor_bytes(data)
        at = self._start + self._begins[name] + offset
        while len(view):
            try:
                num_read = os.preadv(self._descriptor, [view[:LARGEST_READ]], at)
            except OSError as error:
                raise ValueError(
                    f"{self.path}: tensor {name!r} cannot be read: {error.strerror}"
                ) from error
            if not num_read:
                raise ValueError(
                    f"{self.path} is truncated: tensor {name!r} was cut short while it was read"
                )
            view, at = view[num_read:], at + num_read

    def mapped(self, name: str, *, offset: int, num_bytes: int) -> Tensor | None:
        """uint8 [num_bytes], a part of the tensor in the file's own pages, mapped for as long as the result lives; not to be
        written to. None where the filesystem maps no files or the part begins at an odd place: read_into does it then."""
        at = self._start + self._begins[name] + offset
        within = at % mmap.ALLOCATIONGRANULARITY
        if at % self.tensors[name].dtype.itemsize or not num_bytes:
            return None
        try:
            pages = mmap.mmap(
                self._descriptor, within + num_bytes, flags=mmap.MAP_PRIVATE, offset=at - within
            )  # private and writable, as torch takes no other
        except (OSError, ValueError):
            return None
        try:
            pages.madvise(MADV_POPULATE_READ)
        except OSError as error:
            if error.errno != errno.EINVAL:  # of an older kernel
                raise ValueError(
                    f"{self.path} is truncated or cannot be read: tensor {name!r}, {num_bytes} bytes from byte {at} on"
                ) from error
        return torch.frombuffer(pages, dtype=torch.uint8)[within:]

    def tensor(self, name: str) -> Tensor:
        """The whole tensor, in memory of its own."""
        meta = self.tensors[name]
        tensor = torch.empty(meta.shape, dtype=meta.dtype)
        self.read_into(name, tensor)
        return tensor

    def _read_header(self) -> tuple[dict[str, Any], int]:
        try:
            text = header_of(self._descriptor)
            header = parse_json(text[LENGTH_BYTES:])
            _check_metadata(header)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{self.path} ({self.size} bytes) has no whole safetensors header: {error}; it is "
                "truncated, corrupt or another kind of file"
            ) from error
        if SEAL_KEY in header.get("__metadata__", {}):
            check_seal(text, self.path, what="its header")
        return header, len(text)

    def _read_tensors(self, header: dict[str, Any]) -> None:
        try:
            entries = [_entry(name, values) for name, values in header.items()]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{self.path}: a tensor lacks its dtype, shape or place in the header; it is corrupt"
            ) from error
        entries.sort(key=lambda entry: entry.data_offsets)
        at = 0
        for entry in entries:
            name = entry.name
            dtype = entry.dtype
            shape = entry.shape
            begin, end = entry.data_offsets
            if dtype not in DTYPES_BY_NAME:
                raise ValueError(
                    f"{self.path}: tensor {name!r} has dtype {dtype}, of {', '.join(DTYPES_BY_NAME)} none"
                )
            meta = TensorMeta(dtype=DTYPES_BY_NAME[dtype], shape=shape)
            if min(shape, default=0) < 0 or begin != at or end - begin != meta.num_bytes:
                raise ValueError(
                    f"{self.path} is corrupt: tensor {name!r} lies at bytes {begin} to {end}, but {dtype} {shape} from byte "
                    f"{at} on has {meta.num_bytes}"
                )
            if self._start + end > self.size:
                raise ValueError(
                    f"{self.path} is truncated: tensor {name!r} ends at byte {self._start + end}, the file at {self.size}"
                )
            self.tensors[name], self._begins[name], at = meta, begin, end
        if self._start + at != self.size:
            raise ValueError(
                f"{self.path} is corrupt: its tensors end at byte {self._start + at}, the file at {self.size}"
            )


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """A header's entry of one tensor. data_offsets: begin and end, from the header's end on."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def _entry(name: str, values: Mapping[str, Any]) -> _Entry:
    """Raise ValueError, KeyError or TypeError for values of other kinds: 4.0 would fail later."""
    begin, end = values["data_offsets"]
    numbers = [begin, end, *values["shape"]]
    if not isinstance(values["dtype"], str) or any(type(number) is not int for number in numbers):
        raise ValueError(f"{name!r} has {values}")
    shape = tuple(values["shape"])
    return _Entry(name=name, dtype=values["dtype"], shape=shape, data_offsets=(begin, end))


def _check_metadata(header: object) -> None:
    metadata = header.get("__metadata__", {}) if isinstance(header, dict) else None
    if not isinstance(metadata, dict):
        raise ValueError("no JSON object there")
    if not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its __metadata__ holds other values than texts")


def reserve_descriptors(count: int, *, what: str) -> None:
    """Make room for so many more open files, raising the process's soft limit where it is lower.

    Raises ValueError, which names `what` needs them, when the hard limit is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = len(os.listdir("/proc/self/fd"))
    needed = num_open + count + SPARE_DESCRIPTORS
    if needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise ValueError(
            f"{what} needs {count} files open at once, but this process may open {hard} and has "
            f"{num_open}; raise that limit (ulimit -Hn), or use fewer ranks"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def header_of(descriptor: int) -> bytes:
    """Return a safetensors file's header, with its length. Raise ValueError for a torn one."""
    size = os.fstat(descriptor).st_size
    length = int.from_bytes(os.pread(descriptor, LENGTH_BYTES, 0), "little")
    if size < LENGTH_BYTES or length > min(LARGEST_HEADER, size - LENGTH_BYTES):
        raise ValueError(f"it should be {length} bytes long")
    return os.pread(descriptor, LENGTH_BYTES + length, 0)


class TensorWriter:
    """A safetensors file that is written. Its tensors lie in the order of `tensors`; their bytes may come in any order.

    metadata may be given again to close(), if its length as JSON is the same. Where it has UNSEALED
    under SEAL_KEY, the header is sealed. Raises OSError.
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, TensorMeta], *, metadata: Mapping[str, str]
    ) -> None:
        self.path, self._tensors = Path(path), dict(tensors)
        header = header_bytes(self._tensors, metadata=metadata)
        self._header_length, at = len(header), len(header)
        self._begins: dict[str, int] = {}
        for name, meta in self._tensors.items():
            self._begins[name], at = at, at + meta.num_bytes
        self.size = at
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._close = weakref.finalize(self, os.close, self._descriptor)
        self._write_at(header, 0)

    def write(self, name: str, data: Tensor, *, offset: int = 0) -> None:
        """data (contiguous) becomes the tensor's bytes from byte `offset` on."""
        self._write_at(tensor_bytes(data), self._begins[name] + offset)

    def close(self, *, metadata: Mapping[str, str] | None = None, sync: bool = False) -> None:
        """sync: the file is on the disk when this returns."""
        if metadata is not None:
            header = header_bytes(self._tensors, metadata=metadata)
            assert len(header) == self._header_length, "metadata of another length"
            self._write_at(header, 0)
        if sync:
            os.fsync(self._descriptor)
        self._close()

    def abandon(self) -> None:
        self._close()

    def _write_at(self, data: memoryview | bytes, at: int) -> None:
        view = memoryview(data)
        while len(view):
            num_written = os.pwrite(self._descriptor, view[:LARGEST_READ], at)
            view, at = view[num_written:], at + num_written


def header_bytes(tensors: Mapping[str, TensorMeta], *, metadata: Mapping[str, str]) -> bytes:
    """Return length and JSON of a header, sealed where the metadata has a place for it.

    tensors: in the order of their data.
    """
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, meta in tensors.items():
        end = at + meta.num_bytes
        entries[name] = {
            "dtype": NAMES_OF_DTYPES[meta.dtype],
            "shape": list(meta.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # tensors begin aligned
    header = struct.pack("<Q", len(text)) + text
    return sealed(header) if SEAL_KEY in metadata else header


def canonical_order(tensors: Mapping[str, TensorMeta]) -> dict[str, TensorMeta]:
    """As the safetensors library orders them, and hence diffusers: by dtype, then by name."""
    rank = {dtype: place for place, dtype in enumerate(DTYPES_BY_NAME.values())}
    return dict(sorted(tensors.items(), key=lambda item: (rank[item[1].dtype], item[0])))


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, in its own memory."""
    flat = tensor.detach().reshape(-1)
    assert flat.data_ptr() == tensor.data_ptr() or not flat.numel(), "the tensor is not contiguous"
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")
