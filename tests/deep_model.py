"""A small Qwen-Image of many blocks, in which rounding adds up as it does in the real one's 60."""

import json
import shutil
from pathlib import Path

import torch
from diffusers import QwenImageTransformer2DModel
from safetensors.torch import save_file

GAIN, GATE = 0.25, 0.5  # of linear layers, and of what opens the gates: see tools/random_weights.py


def write_deep_model(tiny: Path, out: Path, *, num_layers: int) -> Path:
    """The folder `tiny` with another transformer, of float32 numbers that bfloat16 holds
    exactly.
    """
    shutil.copytree(tiny, out)
    folder = out / "transformer"
    config = json.loads((folder / "config.json").read_text()) | {"num_layers": num_layers}
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    with torch.device("meta"):
        shapes = {
            name: p.shape
            for name, p in QwenImageTransformer2DModel.from_config(config).named_parameters()
        }
    for name, shape in shapes.items():
        opens = name.endswith(("_mod.1.bias", "norm_out.linear.bias"))
        values = torch.randn(shape, generator=generator) * (
            GATE if opens else GAIN * shape[-1] ** -0.5
        )
        tensors[name] = (values + (name.endswith("weight") and len(shape) == 1)).bfloat16().float()
    save_file(tensors, folder / "diffusion_pytorch_model.safetensors")
    return out
