"""Files are byte for byte those of the safetensors library, any part of a tensor is read, and
damage is named.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megadiff.tensors.tensor_file import (
    LEAST_MAPPED,
    TensorFile,
    TensorMeta,
    TensorWriter,
    canonical_order,
)

TENSORS = {
    "z.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "a.half": torch.arange(5).half(),
    "b.brain": torch.arange(6).bfloat16().reshape(2, 3),
    'ünï"code': torch.tensor([True, False, True]),
    "long": torch.arange(3),
    "double": torch.ones(2, dtype=torch.float64),
    "int": torch.arange(4, dtype=torch.int32),
    "short": torch.arange(3, dtype=torch.int16),
    "byte": torch.arange(7, dtype=torch.uint8),
    "signed": torch.arange(3, dtype=torch.int8),
    "eight": torch.arange(3).to(torch.float8_e4m3fn),
    "other eight": torch.arange(3).to(torch.float8_e5m2),
    "scalar": torch.tensor(2.5),
    "empty": torch.ones(0, 4),
}


def metas(tensors: dict[str, Tensor]) -> dict[str, TensorMeta]:
    return canonical_order(
        {n: TensorMeta(dtype=t.dtype, shape=tuple(t.shape)) for n, t in tensors.items()}
    )


def bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "file.safetensors", metadata={"format": "pt"})
    return tmp_path / "file.safetensors"


def test_a_file_is_the_one_that_the_library_writes(file: Path, tmp_path: Path) -> None:
    writer = TensorWriter(tmp_path / "ours", metas(TENSORS), metadata={"format": "pt"})
    for name, tensor in reversed(TENSORS.items()):
        writer.write(name, tensor)
    writer.close()
    assert (tmp_path / "ours").read_bytes() == file.read_bytes()
    assert writer.size == file.stat().st_size


def test_metadata_of_the_same_length_is_given_again_at_the_end(tmp_path: Path) -> None:
    tensors = {"z": TENSORS["z.weight"]}
    writer = TensorWriter(tmp_path / "f", metas(tensors), metadata={"key": "0000"})
    writer.write("z", TENSORS["z.weight"])
    writer.close(metadata={"key": "1234"})
    assert torch.equal(load_file(tmp_path / "f")["z"], TENSORS["z.weight"])
    assert TensorFile(tmp_path / "f").metadata == {"key": "1234"}


@pytest.mark.parametrize("num_bytes", [LEAST_MAPPED - 4, LEAST_MAPPED, LEAST_MAPPED + 4])
@pytest.mark.parametrize("text", ["x", "xyz" * 1000])
def test_a_large_tensor_is_mapped(tmp_path: Path, num_bytes: int, text: str) -> None:
    """Wherever in a page it begins, and however it is cut short."""
    tensors = {"a": torch.arange(3), "z": torch.arange(num_bytes // 4, dtype=torch.float32)}
    save_file(tensors, tmp_path / "f", metadata={"key": text})
    opened = TensorFile(tmp_path / "f")
    assert torch.equal(opened.tensor("z"), tensors["z"])
    (tmp_path / "f").write_bytes((tmp_path / "f").read_bytes()[:-5000])
    with pytest.raises(ValueError, match="f is truncated"):
        opened.tensor("z")


def test_everything_is_read_back(file: Path) -> None:
    opened = TensorFile(file)
    assert opened.tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        found = opened.tensor(name)
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape) and torch.equal(
            bits(found), bits(tensor)
        )


@pytest.mark.parametrize("kept", [0, 3, 8, 100, -1])
def test_a_file_cut_short_is_named(file: Path, kept: int) -> None:
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"file.safetensors.* truncated"):
        TensorFile(file)


def test_a_file_cut_short_while_it_is_read_is_named(file: Path) -> None:
    opened = TensorFile(file)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(
        ValueError,
        match=r"file.safetensors is truncated: tensor '.*' was cut short while it was read",
    ):
        for name in opened.tensors:
            opened.tensor(name)


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "text"),
    [
        (b"[]", "has no whole safetensors header"),
        (b'{"__metadata__": 3}', "has no whole safetensors header"),
        (b"\xff\xfe", "has no whole safetensors header"),
        ({"a": {"dtype": "F32"}}, "a tensor lacks its dtype, shape or place"),
        ({"a": 3}, "a tensor lacks its dtype, shape or place"),
        ({"a": entry(dtype="F3")}, "tensor 'a' has dtype F3, of I64,"),
        ({"a": entry(offsets=(0, 4))}, "is corrupt: tensor 'a' lies at bytes 0 to 4"),
        ({"a": entry(offsets=(4, 12))}, "is corrupt: tensor 'a' lies at bytes 4 to 12"),
        (
            {"a": entry(), "b": entry(offsets=(4, 12))},
            "is corrupt: tensor 'b' lies at bytes 4 to 12",
        ),
        ({"a": entry(shape=(-2,), offsets=(0, -8))}, "is corrupt: tensor 'a'"),
        ({"a": entry(shape=(1,), offsets=(0, 4))}, "is corrupt: its tensors end at byte"),
        ({"a": entry(shape=(4,), offsets=(0, 16))}, "is truncated: tensor 'a' ends at byte"),
    ],
)
def test_a_header_that_is_wrong_is_named(tmp_path: Path, header: object, text: str) -> None:
    data = header if isinstance(header, bytes) else json.dumps(header).encode()
    (tmp_path / "bad").write_bytes(struct.pack("<Q", len(data)) + data + bytes(8))
    with pytest.raises(ValueError, match=text):
        TensorFile(tmp_path / "bad")
    with pytest.raises(ValueError, match="nowhere cannot be read: No such file"):
        TensorFile(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="cannot be read|header"):
        TensorFile(tmp_path)
