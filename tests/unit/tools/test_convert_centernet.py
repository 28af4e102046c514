"""A TensorFlow.js graph of four operators, converted and run, against loops over its pixels."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path

import convert_centernet
import numpy as np
import pytest
import torch

from megadiff.rewards.centernet import CenterNet

random = np.random.default_rng(0)
KERNEL = random.normal(size=(3, 3, 3, 2)).astype(np.float16)  # height, width, in, out
BIAS = random.normal(size=2).astype(np.float16)
DEPTHWISE = random.normal(size=(3, 3, 2, 1)).astype(np.float16)  # height, width, channels, 1
SIZE = np.array([4, 4], np.int32)


def text(value: str) -> str:
    return base64.b64encode(value.encode()).decode()


def convolution(op: str, name: str, inputs: list[str], stride: int, *fused: str) -> dict:
    attributes = {
        "strides": {"list": {"i": ["1", str(stride), str(stride), "1"]}},
        "padding": {"s": text("SAME")},
        "fused_ops": {"list": {"s": [text(name) for name in fused]}},
    }
    return {"name": name, "op": op, "input": inputs, "attr": attributes}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    image = convert_centernet.IMAGE
    nodes = [
        convolution("_FusedConv2D", "a", [image, "kernel", "bias"], 2, "BiasAdd", "Relu"),
        convolution("DepthwiseConv2dNative", "b", ["a", "depthwise"], 1),
        {"name": "c", "op": "ResizeBilinear", "input": ["b", "size"]},
        {"name": convert_centernet.HEAT, "op": "Sigmoid", "input": ["c"]},
        {"name": convert_centernet.SIZES, "op": "Mul", "input": ["c", "factor"]},
        # What nothing asks for is left out, as is the part that makes boxes.
        {"name": "tower_0/boxes", "op": "TopKV2", "input": [convert_centernet.HEAT]},
    ]
    constants = {
        "kernel": KERNEL,
        "bias": BIAS,
        "depthwise": DEPTHWISE,
        "size": SIZE,
        "factor": np.array(4, np.float16),
    }
    entries = []
    for name, array in constants.items():
        entry = {"name": name, "shape": list(array.shape), "dtype": "int32"}
        if array.dtype == np.float16:
            entry |= {"dtype": "float32", "quantization": {"dtype": "float16"}}
        entries.append(entry)
    model = {
        "modelTopology": {"node": nodes},
        "weightsManifest": [{"paths": ["centernet.bin"], "weights": entries}],
    }
    (tmp_path / "models").mkdir()
    (tmp_path / "LICENSE").write_text("MIT")
    (tmp_path / "models/centernet.json").write_text(json.dumps(model))
    data = b"".join(array.tobytes() for array in constants.values())
    (tmp_path / "models/centernet.bin").write_bytes(data)
    return tmp_path


def same(x: np.ndarray, size: int, stride: int) -> np.ndarray:
    """Pad [H, W, C] as TensorFlow does: the odd pixel is below and to the right."""
    out = -(-x.shape[0] // stride)
    total = (out - 1) * stride + size - x.shape[0]
    side = (total // 2, total - total // 2)
    return np.pad(x, (side, side, (0, 0)))


def test_converted_operators_are_those_of_tensorflow(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["convert_centernet.py", str(package), str(out)])
    convert_centernet.main()
    assert (out / "LICENSE").read_text() == "MIT"
    graph = json.loads((out / "graph.json").read_text())
    assert [step["op"] for step in graph["steps"]] == ["conv", "conv", "double", "sigmoid", "mul"]
    assert len(graph["labels"]) == len(set(graph["labels"])) == 80

    image = random.uniform(0, 1, (4, 4, 3)).astype(np.float32)
    pixels = torch.from_numpy(image).permute(2, 0, 1)[None]
    heat, sizes = CenterNet(out, torch.device("cpu"))._run(pixels)

    first = np.zeros((2, 2, 2))
    padded = same(image, 3, 2)
    for y, x, channel in np.ndindex(2, 2, 2):
        window = padded[2 * y : 2 * y + 3, 2 * x : 2 * x + 3]
        first[y, x, channel] = max(0, (window * KERNEL[..., channel]).sum() + BIAS[channel])
    second = np.zeros((2, 2, 2))
    padded = same(first, 3, 1)
    for y, x, channel in np.ndindex(2, 2, 2):
        window = padded[y : y + 3, x : x + 3, channel]
        second[y, x, channel] = (window * DEPTHWISE[..., channel, 0]).sum()
    # Pixel i is at i / 2, without TensorFlow 2's half pixels; beyond the last one it stays.
    third = np.zeros((4, 4, 2))
    for y, x in np.ndindex(4, 4):
        rows = second[[y // 2, min((y + 1) // 2, 1)]].mean(axis=0)
        third[y, x] = rows[[x // 2, min((x + 1) // 2, 1)]].mean(axis=0)

    expected = torch.from_numpy(third).float().permute(2, 0, 1)
    torch.testing.assert_close(sizes, 4 * expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(heat, expected.sigmoid(), atol=1e-4, rtol=1e-4)


def test_weights_that_are_not_all_named_are_refused(package: Path, tmp_path: Path) -> None:
    file = package / "models/centernet.bin"
    file.write_bytes(file.read_bytes() + b"xy")
    model = json.loads((package / "models/centernet.json").read_text())
    with pytest.raises(ValueError, match="bytes are named"):
        convert_centernet.read_constants(model, package / "models")
