"""A transformer of any size with random weights, as a model folder that engines load: for benchmarks at real size."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from megadiff.models.files import read_json
from megadiff.models.qwen_image.tiny import SCHEDULER_CONFIG
from megadiff.models.registry import build_adapter

SHARD_BYTES = 4 << 30
GAIN = 0.25  # of a linear layer: with 1 the network amplifies rounding to a fifth of its output
GATE = 0.5  # spread of the modulations' biases: with none, gates are shut and the output shows nothing of the blocks


def write_random_transformer(source: Path, out: Path, *, device: str, num_layers: int = 0) -> int:
    """The model of source's config.json files, with random bfloat16 weights; returns the number of its parameters.

    source: a pipeline folder, of which model_index.json and transformer/config.json are enough. num_layers: 0 keeps the
    config's. device: on which numbers are drawn. Weights are normal, those of norms around 1: output and gradients are
    finite and not zero. One shard of 4 GiB is in memory at a time.
    """
    folder = out / "transformer"
    folder.mkdir(parents=True)
    config = read_json(source / "transformer" / "config.json")
    (folder / "config.json").write_text(json.dumps(config | ({"num_layers": num_layers} if num_layers else {})))
    shutil.copy(source / "model_index.json", out)
    (out / "scheduler").mkdir()
    (out / "scheduler" / "scheduler_config.json").write_text(json.dumps(SCHEDULER_CONFIG))
    adapter = build_adapter(out)
    shapes = {name: p.shape for name, p in adapter.empty_transformer().named_parameters()}
    kinds = adapter.plan.kinds(shapes)
    generator = torch.Generator(device).manual_seed(0)
    shard: dict[str, torch.Tensor] = {}
    places: dict[str, str] = {}
    for place, (name, shape) in enumerate(shapes.items()):
        is_gate = kinds[name] == "modulation" and name.endswith("bias")
        spread = GATE if is_gate else GAIN * shape[-1] ** -0.5
        tensor = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) * spread
        shard[name] = (tensor + 1 if name.endswith("weight") and len(shape) == 1 else tensor).cpu()
        if sum(each.nbytes for each in shard.values()) > SHARD_BYTES or place == len(shapes) - 1:
            file = f"diffusion_pytorch_model-{len(set(places.values())):05d}.safetensors"
            save_file(shard, folder / file)
            places |= dict.fromkeys(shard, file)
            shard = {}
    index = {"metadata": {"total_size": 2 * sum(map(torch.Size.numel, shapes.values()))}, "weight_map": places}
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    return sum(map(torch.Size.numel, shapes.values()))
