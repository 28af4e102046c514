"""A bucket as bytes: what is written is what is read."""

import pytest
import torch
from safetensors.torch import load, save

from megadiff.sync.bucket import (
    CHUNK_BYTES,
    bucket_manifest,
    encode_bucket,
    file_manifest,
    flat_bytes,
    read_flat,
    write_flat,
)


def test_bucket_round_trip(tmp_path) -> None:
    fused = torch.randn(6, 4)
    tensors = [
        ("a.q", fused[:2]),
        ("a.k", fused[2:4]),
        ("b", torch.randn(3).bfloat16()),
    ]  # views of one storage
    path = tmp_path / "bucket"
    encode_bucket(tensors).write(path)
    assert file_manifest(path) == {
        "a.q": {"dtype": "float32", "shape": [2, 4]},
        "a.k": {"dtype": "float32", "shape": [2, 4]},
        "b": {"dtype": "bfloat16", "shape": [3]},
    }
    path.write_bytes(bytes(encode_bucket(tensors))[:-1])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        file_manifest(path)
    encode_bucket([("ids", torch.zeros(2, dtype=torch.int64))]).write(path)
    with pytest.raises(ValueError, match="ids is I64"):
        file_manifest(path)
    with pytest.raises(ValueError, match="a.q more than once"):
        encode_bucket([tensors[0], tensors[0]])


def test_a_body_is_what_the_safetensors_library_writes_in_chunks() -> None:
    """However its tensors lie; small ones share a chunk, large ones are cut, and it can be sent
    more than once.
    """
    tensors = {
        "large": torch.arange(CHUNK_BYTES, dtype=torch.float32),
        "turned": torch.randn(5, 7).t(),
        "odd": torch.ones(3, dtype=torch.bfloat16),
        "none": torch.zeros(0, 4),
        "scalar": torch.tensor(2.5),
    } | {f"small{number}": torch.full((7,), float(number)) for number in range(100)}
    body = encode_bucket(list(tensors.items()))
    assert bytes(body) == save({name: tensor.contiguous() for name, tensor in tensors.items()})
    for _ in range(2):
        chunks = list(body)
        assert b"".join(chunks) == bytes(body) and len(body) == len(bytes(body))
        assert max(map(len, chunks)) <= CHUNK_BYTES and len(chunks) <= 7
    held = load(bytes(body))
    assert all(torch.equal(held[name], tensor) for name, tensor in tensors.items())


def test_flat_round_trip() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [
        ("a", torch.randn(3, 5, generator=generator)),
        ("b", torch.randn(7, generator=generator).bfloat16()),
        ("scalar", torch.tensor(2.5)),
        ("cut", torch.randn(4, 6, generator=generator)[:, 1:3]),  # not contiguous
        ("none", torch.zeros(0, 4)),
    ]
    manifest = bucket_manifest(tensors)
    flat = torch.full((flat_bytes(manifest),), 255, dtype=torch.uint8)
    write_flat(tensors, flat)
    held = dict(read_flat(manifest, flat))
    assert list(held) == [name for name, _ in tensors]
    for name, tensor in tensors:
        assert held[name].dtype == tensor.dtype and torch.equal(held[name], tensor)
