"""The converter's memory does not grow with the model."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megadiff.models.registry import component_model
from megadiff.tensors.tensor_file import TensorMeta, header_bytes

ROOT = Path(__file__).parents[3]
MIB = 1 << 20
CODE = """
import re, sys
from megadiff.convert.command import main
for index in range(1, len(sys.argv), 6):
    assert main(sys.argv[index : index + 6]) == 0
    # not ru_maxrss, which begins with the parent's
    print("peak", re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
"""


@pytest.fixture(scope="module")
def large(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transformer of 0.5 GiB, all zeros, which take no room on the disk."""
    import torch

    folder = tmp_path_factory.mktemp("large")
    config = json.loads((tiny_model / "transformer" / "config.json").read_text())
    sizes = {
        "num_layers": 4,
        "num_attention_heads": 8,
        "attention_head_dim": 128,
        "axes_dims_rope": [16, 56, 56],
    }
    (folder / "config.json").write_text(json.dumps(config | sizes))
    shapes = component_model(folder).shapes
    tensors = {
        name: TensorMeta(dtype=torch.float32, shape=shape) for name, shape in sorted(shapes.items())
    }
    header = header_bytes(tensors, metadata={"format": "pt"})
    size = sum(meta.num_bytes for meta in tensors.values())
    with open(folder / "diffusion_pytorch_model.safetensors", "wb") as file:
        file.write(header)
        file.truncate(len(header) + size)
    assert size > 500 * MIB and max(meta.num_bytes for meta in tensors.values()) < 30 * MIB
    yield folder
    shutil.rmtree(folder)


@pytest.mark.slow
def test_peak_memory_is_a_few_tensors_whatever_the_size(
    tiny_model: Path, large: Path, tmp_path: Path
) -> None:
    """Read whole or mapped, the large model would take 0.5 GiB more than the tiny one.

    Its tensors are below 30 MiB. Two are in memory, with what they are cut into.
    """
    there = tmp_path / "tp4"
    back = tmp_path / "back"
    tp4 = ["--to", "megatron", "--tp", "4"]
    first, *rest = _peaks(
        [tiny_model, tmp_path / "tiny", *tp4],
        [large, there, *tp4],
        [there, back, "--to", "diffusers", "--dtype", "keep"],
    )
    shutil.rmtree(tmp_path)
    assert max(rest) - first < 300 * MIB and max(rest) < 1024 * MIB


def _peaks(*conversions: list[object]) -> list[int]:
    """Peak resident bytes of one process after each of its conversions."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [
        sys.executable,
        "-c",
        CODE,
        *(str(each) for conversion in conversions for each in conversion),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=120, check=True
    )
    return [
        int(line.split()[1]) * 1024 for line in done.stdout.splitlines() if line.startswith("peak ")
    ]
