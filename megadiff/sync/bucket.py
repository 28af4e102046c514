"""A bucket of named weights as bytes: a safetensors body or file, or one flat tensor with the tensors laid end to end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megadiff.tensors.manifest import Manifest
from megadiff.tensors.tensor_file import TensorMeta, canonical_order, header_bytes, tensor_bytes
from megadiff.types import DTYPES

Bucket = Sequence[tuple[str, Tensor]]
ALIGNMENT = 256  # bytes, of a tensor's start in a flat bucket: what vector loads on any device want
CHUNK_BYTES = (
    1 << 18
)  # of a body on its way: an HTTP client copies what a socket did not take of a chunk at once
_DTYPE_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


class BucketBody:
    """A bucket as the bytes of a safetensors file, read from where its tensors lie: on the CPU, contiguous, unchanged for as
    long as the body is used. Iterating gives chunks of about CHUNK_BYTES, as often as it is asked."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        metas = {
            name: TensorMeta(dtype=tensor.dtype, shape=tuple(tensor.shape))
            for name, tensor in tensors.items()
        }
        metas = canonical_order(metas)
        self._parts = [
            memoryview(header_bytes(metas, metadata={})),
            *(tensor_bytes(tensors[name]) for name in metas),
        ]
        self._num_bytes = sum(map(len, self._parts))

    def __len__(self) -> int:
        return self._num_bytes

    def __bytes__(self) -> bytes:
        return b"".join(self._parts)

    def __iter__(self) -> Iterator[bytes]:
        pieces, size = [], 0
        for part in self._parts:
            for begin in range(0, len(part), CHUNK_BYTES):
                piece = part[begin : begin + CHUNK_BYTES]
                if pieces and size + len(piece) > CHUNK_BYTES:
                    yield b"".join(pieces)
                    pieces, size = [], 0
                pieces.append(piece)
                size += len(piece)
        if pieces:
            yield b"".join(pieces)

    def write(self, path: Path) -> None:
        """Into a file, from its beginning. Raises OSError."""
        with path.open("wb", buffering=0) as file:
            for part in self._parts:
                while len(part):
                    part = part[file.write(part) :]


def encode_bucket(tensors: Bucket) -> BucketBody:
    """Named weights on the CPU as a body. Raises ValueError for a name that comes twice."""
    names = [name for name, _ in tensors]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"weight bucket holds {', '.join(twice)} more than once; each name travels once"
        )
    return BucketBody({name: tensor.detach().contiguous() for name, tensor in tensors})


def own_host_tensor(tensor: Tensor) -> Tensor:
    host = tensor.detach().cpu().contiguous()
    return host if host.untyped_storage().nbytes() == host.nbytes else host.clone()


def file_manifest(path: Path) -> Manifest:
    """name → {"dtype", "shape"} of a bucket in a file; reads its header only.

    Raises ValueError when the file is not whole, or holds another dtype than weights have.
    """
    try:
        with safe_open(path, framework="pt") as file:
            rows = {name: file.get_slice(name) for name in file.keys()}
            dtypes = {name: row.get_dtype() for name, row in rows.items()}
            strange = sorted(name for name, dtype in dtypes.items() if dtype not in _DTYPE_NAMES)
            if strange:
                allowed = ", ".join(_DTYPE_NAMES.values())
                raise ValueError(f"{strange[0]} is {dtypes[strange[0]]}; weights are {allowed}")
            return {
                name: {"dtype": _DTYPE_NAMES[dtypes[name]], "shape": row.get_shape()}
                for name, row in rows.items()
            }
    except SafetensorError as error:
        raise ValueError(
            f"the body of {path.stat().st_size} bytes is not a whole safetensors file: {error}"
        ) from None


def bucket_manifest(tensors: Bucket) -> Manifest:
    """name → {"dtype", "shape"}, in the bucket's order, which is the order of a flat bucket."""
    return {
        name: {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        for name, tensor in tensors
    }


def flat_bytes(manifest: Manifest) -> int:
    """Size of the flat bucket of these tensors."""
    return sum(_padded(row) for row in manifest.values())


def write_flat(tensors: Bucket, flat: Tensor) -> None:
    """Lays the tensors end to end into `flat` (uint8, at least flat_bytes long), on its device."""
    for (_, tensor), (_, view) in zip(
        tensors, read_flat(bucket_manifest(tensors), flat), strict=True
    ):
        view.copy_(tensor.detach(), non_blocking=True)


def read_flat(manifest: Manifest, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a flat bucket, as views of it."""
    begin = 0
    for name, row in manifest.items():
        dtype = DTYPES[row["dtype"]]
        count = _count(row)
        yield name, flat[begin : begin + count * dtype.itemsize].view(dtype).view(row["shape"])
        begin += _padded(row)


def _count(row: Mapping[str, object]) -> int:
    return torch.Size(row["shape"]).numel()


def _padded(row: Mapping[str, object]) -> int:
    return -(-_count(row) * DTYPES[row["dtype"]].itemsize // ALIGNMENT) * ALIGNMENT
