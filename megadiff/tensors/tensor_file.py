"""Safetensors files, tensor by tensor: read or mapped, and written in any order.

The safetensors library maps whole files, whose pages then count as the process's own memory. Here
only the tensors that are in use do. A file that is written has its header first, as the library and
hence diffusers write it: `__metadata__` in front, compact JSON, padded with spaces to 8 bytes. Then
come the tensors, one after another.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import struct
import sys
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megadiff.tensors.model_files import parse_json
from megadiff.tensors.seals import SEAL_KEY, check_seal, sealed
from megadiff.types import JsonObject, Shape

# In the order in which the safetensors library puts tensors, which keeps them aligned.
DTYPES_BY_NAME = {
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
LENGTH_BYTES = 8  # of a header's length, in front of it
LARGEST_HEADER = 100_000_000  # bytes; the safetensors library refuses more
LEAST_MAPPED = 1 << 20  # bytes; less is sooner read than mapped
# Linux 5.14. It fails where a page cannot be read, which on touching it would kill the process.
MADV_POPULATE_READ = 22
LARGEST_READ = 1 << 30  # bytes in one call of the system, which takes 2 GiB at most
_INTEGERS = {int}


class TensorMeta(NamedTuple):
    """Dtype and shape of a tensor, as a header has them.

    A tuple, since a checkpoint of hundreds of ranks has a million of them.
    """

    dtype: torch.dtype
    shape: Shape

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFile:
    """A safetensors file, open for reading. tensors: in the order of their data.

    Opening reads the header and compares it with the file's size, and with its seal where it has
    one. Raises ValueError that names the file, what is wrong, and the tensor where it is about one.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        try:
            self._descriptor = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise ValueError(f"{self.path} cannot be read: {error.strerror}; restore it") from error

        # closed with the object, which those who are yet to read a tensor keep alive
        self._close = weakref.finalize(self, os.close, self._descriptor)
        self.size = os.fstat(self._descriptor).st_size
        header, self._start = self._read_header()
        self.metadata: dict[str, str] = header.pop("__metadata__", {})
        self.tensors: dict[str, TensorMeta] = {}
        self._begins: dict[str, int] = {}
        self._read_tensors(header)

    def close(self) -> None:
        self._close()

    def tensor(self, name: str) -> Tensor:
        """Return a whole tensor, not to be written to. Raises ValueError when it cannot be read.

        A large one lies in the file's own pages, mapped for as long as the result lives.
        """
        meta = self.tensors[name]
        begin = self._start + self._begins[name]
        # A short read is faster than mapping. Tensors at odd addresses are slow, or not allowed.
        if meta.num_bytes >= LEAST_MAPPED and begin % meta.dtype.itemsize == 0:
            pages = self._mapped(name, begin, meta.num_bytes)
            if pages is not None:
                return pages.view(meta.dtype).view(meta.shape)

        tensor = torch.empty(meta.shape, dtype=meta.dtype)
        self._read_into(name, tensor_bytes(tensor), begin)
        return tensor

    def _read_into(self, name: str, view: memoryview, begin: int) -> None:
        while len(view):
            try:
                num_read = os.preadv(self._descriptor, [view[:LARGEST_READ]], begin)
            except OSError as error:
                raise ValueError(
                    f"{self.path}: tensor {name!r} cannot be read: {error.strerror}"
                ) from error
            if not num_read:
                raise ValueError(
                    f"{self.path} is truncated: tensor {name!r} was cut short while it was read"
                )
            # a call may read less than it was asked for
            view = view[num_read:]
            begin += num_read

    def _mapped(self, name: str, begin: int, num_bytes: int) -> Tensor | None:
        """Map bytes of the file as uint8 [num_bytes]; None where the filesystem maps no files."""
        # a mapping begins where a page does
        within = begin % mmap.ALLOCATIONGRANULARITY
        try:
            # Private and writable, as torch takes no other.
            pages = mmap.mmap(
                self._descriptor, within + num_bytes, flags=mmap.MAP_PRIVATE, offset=begin - within
            )
        except (OSError, ValueError):
            return None

        try:
            pages.madvise(MADV_POPULATE_READ)
        except OSError as error:
            if error.errno != errno.EINVAL:  # of an older kernel
                raise ValueError(
                    f"{self.path} is truncated or cannot be read: tensor {name!r}, {num_bytes} "
                    f"bytes from byte {begin} on"
                ) from error

        return torch.frombuffer(pages, dtype=torch.uint8)[within:]

    def _read_header(self) -> tuple[JsonObject, int]:
        try:
            text = header_of(self._descriptor)
            header = parse_json(text[LENGTH_BYTES:])
            metadata = header.get("__metadata__", {}) if isinstance(header, dict) else None
            if not isinstance(metadata, dict):
                raise ValueError("no JSON object there")
            if not all(isinstance(value, str) for value in metadata.values()):
                raise ValueError("its __metadata__ holds other values than texts")
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{self.path} ({self.size} bytes) has no whole safetensors header: {error}; it is "
                "truncated, corrupt or another kind of file"
            ) from error

        if SEAL_KEY in metadata:
            check_seal(text, self.path, what="its header")
        return header, len(text)

    def _read_tensors(self, header: JsonObject) -> None:
        try:
            entries = [_entry(name, values) for name, values in header.items()]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{self.path}: a tensor lacks its dtype, shape or place in the header; it is "
                "corrupt"
            ) from error

        # a header may list them in any order
        entries.sort(key=lambda entry: (entry.begin, entry.end))
        expected = 0  # tensors lie one after another
        metas: dict[tuple[str, Shape], tuple[TensorMeta, int]] = {}  # most tensors share theirs
        for begin, end, name, dtype, shape in entries:
            sized_meta = metas.get((dtype, shape))
            if sized_meta is None:
                meta = self._meta(name, dtype, shape)
                sized_meta = metas[dtype, shape] = (meta, meta.num_bytes)

            meta, num_bytes = sized_meta
            if begin != expected or end - begin != num_bytes:
                raise ValueError(
                    f"{self.path} is corrupt: tensor {name!r} lies at bytes {begin} to {end}, but "
                    f"{dtype} {shape} from byte {expected} on has {num_bytes}"
                )
            if self._start + end > self.size:
                raise ValueError(
                    f"{self.path} is truncated: tensor {name!r} ends at byte {self._start + end}, "
                    f"the file at {self.size}"
                )

            self.tensors[name] = meta
            self._begins[name] = begin
            expected = end

        if self._start + expected != self.size:
            raise ValueError(
                f"{self.path} is corrupt: its tensors end at byte {self._start + expected}, the "
                f"file at {self.size}"
            )

    def _meta(self, name: str, dtype: str, shape: Shape) -> TensorMeta:
        if dtype not in DTYPES_BY_NAME:
            raise ValueError(
                f"{self.path}: tensor {name!r} has dtype {dtype}, of {', '.join(DTYPES_BY_NAME)} "
                "none"
            )
        if min(shape, default=0) < 0:
            raise ValueError(
                f"{self.path} is corrupt: tensor {name!r} has shape {shape}, with a size below 0"
            )
        return TensorMeta(dtype=DTYPES_BY_NAME[dtype], shape=shape)


class _Entry(NamedTuple):
    """A header's entry of one tensor. begin, end: of its data, from the header's end on."""

    begin: int
    end: int
    name: str
    dtype: str
    shape: Shape


def _entry(name: str, values: Mapping[str, Any]) -> _Entry:
    """Raise ValueError, KeyError or TypeError for values of other kinds: 4.0 would fail later."""
    begin, end = values["data_offsets"]
    dtype = values["dtype"]
    shape = tuple(values["shape"])
    if not isinstance(dtype, str) or not are_integers((begin, end, *shape)):
        raise ValueError(f"{name!r} has {values}")
    # All ranks' files of a checkpoint have the same names, which so take memory once.
    return _Entry(begin, end, sys.intern(name), dtype, shape)


def check_format(path: Path, written_as: object, known: int) -> None:
    """Raise ValueError where a file of ours was written in another format than is known here."""
    if written_as != known:
        raise ValueError(
            f"{path} has format {written_as}, this version of megadiff reads format {known}; use "
            "the one that wrote it"
        )


def are_integers(values: Iterable[object]) -> bool:
    """Tell whether all values are integers; isinstance would take JSON's true for 1."""
    return set(map(type, values)) <= _INTEGERS


def header_of(descriptor: int) -> bytes:
    """Return a safetensors file's header, with its length. Raise ValueError for a torn one."""
    size = os.fstat(descriptor).st_size
    length = int.from_bytes(os.pread(descriptor, LENGTH_BYTES, 0), "little")
    if size < LENGTH_BYTES or length > min(LARGEST_HEADER, size - LENGTH_BYTES):
        raise ValueError(f"it should be {length} bytes long")
    return os.pread(descriptor, LENGTH_BYTES + length, 0)


class TensorWriter:
    """A safetensors file that is written. tensors: in the order of their data; any comes first.

    metadata may be given again to close(), if its length as JSON is the same. Where it has UNSEALED
    under SEAL_KEY, the header is sealed. Raises OSError.
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, TensorMeta], *, metadata: Mapping[str, str]
    ) -> None:
        self.path = Path(path)
        self._tensors = dict(tensors)
        header = header_bytes(self._tensors, metadata=metadata)
        self._header_length = len(header)

        self._begins: dict[str, int] = {}
        self.size = len(header)
        for name, meta in self._tensors.items():
            self._begins[name] = self.size
            self.size += meta.num_bytes

        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._close = weakref.finalize(self, os.close, self._descriptor)
        self._write_at(header, 0)

    def write(self, name: str, data: Tensor) -> None:
        """Write the tensor's data, which is contiguous and on the CPU."""
        self._write_at(tensor_bytes(data), self._begins[name])

    def close(self, *, metadata: Mapping[str, str] | None = None, sync: bool = False) -> None:
        """Close the file, which may be closed. sync: it is on the disk when this returns."""
        if metadata is not None:
            header = header_bytes(self._tensors, metadata=metadata)
            assert len(header) == self._header_length, "metadata of another length"
            self._write_at(header, 0)
        if sync:
            os.fsync(self._descriptor)
        self._close()

    def _write_at(self, data: memoryview | bytes, begin: int) -> None:
        view = memoryview(data)
        while len(view):
            num_written = os.pwrite(self._descriptor, view[:LARGEST_READ], begin)
            # a call may write less than it was asked for
            view = view[num_written:]
            begin += num_written


def header_bytes(tensors: Mapping[str, TensorMeta], *, metadata: Mapping[str, str]) -> bytes:
    """Return length and JSON of a header, sealed where the metadata has a place for it.

    tensors: in the order of their data.
    """
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    begin = 0
    for name, meta in tensors.items():
        end = begin + meta.num_bytes
        entries[name] = {
            "dtype": NAMES_OF_DTYPES[meta.dtype],
            "shape": list(meta.shape),
            "data_offsets": [begin, end],
        }
        begin = end

    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # tensors begin aligned
    header = struct.pack("<Q", len(text)) + text
    return sealed(header) if SEAL_KEY in metadata else header


def canonical_order(tensors: Mapping[str, TensorMeta]) -> dict[str, TensorMeta]:
    """Order tensors as the safetensors library and diffusers do: by dtype, then by name."""
    dtypes = list(DTYPES_BY_NAME.values())
    return dict(sorted(tensors.items(), key=lambda item: (dtypes.index(item[1].dtype), item[0])))


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, in its own memory."""
    flat = tensor.detach().reshape(-1)
    assert flat.data_ptr() == tensor.data_ptr() or not flat.numel(), "the tensor is not contiguous"
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
