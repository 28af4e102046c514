"""Encode a bucket of named weights as bytes.

They are either a safetensors body or file, or one flat tensor in which the tensors lie end to end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megadiff.tensors.manifest import Manifest
from megadiff.tensors.tensor_file import TensorMeta, canonical_order, header_bytes, tensor_bytes
from megadiff.types import DTYPES

Bucket = Sequence[tuple[str, Tensor]]
# Bytes at which a tensor starts in a flat bucket: vector loads on any device want it aligned.
ALIGNMENT = 256
# Of a body on its way. An HTTP client copies what a socket did not take of a chunk at once.
CHUNK_BYTES = 1 << 18
# Safetensors' names of the dtypes that weights travel in.
_DTYPE_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


class BucketBody:
    """Read a bucket as the bytes of a safetensors file, from where its tensors lie.

    Tensors are on the CPU, contiguous, and unchanged for as long as the body is used. It may be
    iterated more than once; chunks have at most CHUNK_BYTES.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        metas = {
            name: TensorMeta(dtype=tensor.dtype, shape=tuple(tensor.shape))
            for name, tensor in tensors.items()
        }
        metas = canonical_order(metas)
        self._buffers = [
            memoryview(header_bytes(metas, metadata={})),
            *(tensor_bytes(tensors[name]) for name in metas),
        ]
        self._num_bytes = sum(map(len, self._buffers))

    def __len__(self) -> int:
        return self._num_bytes

    def __bytes__(self) -> bytes:
        return b"".join(self._buffers)

    def __iter__(self) -> Iterator[bytes]:
        chunk: list[memoryview] = []
        size = 0

        for buffer in self._buffers:
            for begin in range(0, len(buffer), CHUNK_BYTES):
                view = buffer[begin : begin + CHUNK_BYTES]
                # Small tensors share a chunk: a system call for each of them would be slow.
                if chunk and size + len(view) > CHUNK_BYTES:
                    yield b"".join(chunk)
                    chunk = []
                    size = 0
                chunk.append(view)
                size += len(view)

        if chunk:
            yield b"".join(chunk)

    def write(self, path: Path) -> None:
        """Write into a file, from its beginning. Raises OSError."""
        with path.open("wb") as file:
            file.writelines(self._buffers)


def encode_bucket(tensors: Bucket) -> BucketBody:
    """Return named weights on the CPU as a body. Raises ValueError for a name that comes twice."""
    counts = Counter(name for name, _ in tensors)
    twice = sorted(name for name, count in counts.items() if count > 1)
    if twice:
        raise ValueError(
            f"weight bucket holds {', '.join(twice)} more than once; each name travels once"
        )
    return BucketBody({name: tensor.detach().contiguous() for name, tensor in tensors})


def own_host_tensor(tensor: Tensor) -> Tensor:
    """Return the tensor on the CPU, contiguous, with a storage that holds nothing else."""
    host = tensor.detach().cpu().contiguous()
    return host if host.untyped_storage().nbytes() == host.nbytes else host.clone()


def file_manifest(path: Path) -> Manifest:
    """Return the manifest of a bucket in a file; reads its header only.

    Raises ValueError when the file is not whole, or holds another dtype than weights have.
    """
    manifest: Manifest = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                row = file.get_slice(name)
                dtype = row.get_dtype()
                if dtype not in _DTYPE_NAMES:
                    allowed = ", ".join(_DTYPE_NAMES.values())
                    raise ValueError(f"{name} is {dtype}; weights are {allowed}")
                manifest[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": row.get_shape()}
    except SafetensorError as error:
        raise ValueError(
            f"the body of {path.stat().st_size} bytes is not a whole safetensors file: {error}"
        ) from None

    return manifest


def bucket_manifest(tensors: Bucket) -> Manifest:
    """Return name → {"dtype", "shape"}, in the bucket's order, which a flat bucket has too."""
    return {
        name: {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        for name, tensor in tensors
    }


def flat_bytes(manifest: Manifest) -> int:
    """Return the size of the flat bucket of these tensors."""
    size = 0
    for row in manifest.values():
        size = _next_begin(size, torch.Size(row["shape"]).numel() * DTYPES[row["dtype"]].itemsize)
    return size


def write_flat(tensors: Bucket, flat: Tensor) -> None:
    """Copy the tensors end to end into `flat` (uint8, at least flat_bytes long), on its device."""
    views = read_flat(bucket_manifest(tensors), flat)
    for (_, tensor), (_, view) in zip(tensors, views, strict=True):
        view.copy_(tensor.detach(), non_blocking=True)


def read_flat(manifest: Manifest, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a flat bucket, as views of it."""
    begin = 0
    for name, row in manifest.items():
        dtype = DTYPES[row["dtype"]]
        num_bytes = torch.Size(row["shape"]).numel() * dtype.itemsize
        yield name, flat[begin : begin + num_bytes].view(dtype).view(row["shape"])
        begin = _next_begin(begin, num_bytes)


def _next_begin(begin: int, num_bytes: int) -> int:
    # −(−a // b) is a / b rounded up.
    return begin + -(-num_bytes // ALIGNMENT) * ALIGNMENT
