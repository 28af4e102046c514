"""Draw BAGEL folders of any size with random weights: all lies in the root, as it is published.

tools/random_weights.py writes them where --model has no model_index.json.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import SiglipVisionConfig, SiglipVisionModel

from examples.tiny_models.qwen_image import build_tokenizer
from megadiff.models.bagel.adapter import PUBLISHED_LAYERS, BagelAdapter
from megadiff.models.bagel.transformer import BagelSizes
from megadiff.tensors.model_files import GENERATION_CORE, LANGUAGE_MODEL, ROOT_FILE, read_json

GAIN = 0.25  # of a matrix, as of the other families' random weights
VAE_SIZES = ("ch", "ch_mult", "num_res_blocks")  # in config.json of models that are not published


def write_random_bagel(source: Path, out: Path, *, device: str, num_layers: int = 0) -> int:
    """Write the model of source's three configs. Return the parameters of its transformer.

    All weights are in memory at once, as one file holds them: 29 GB for BAGEL-7B-MoT.
    num_layers: 0 keeps the configs'. device: on which numbers are drawn.
    """
    configs = _configs(source, num_layers)
    out.mkdir(parents=True)
    for name, values in configs.items():
        (out / name).write_text(json.dumps(values, indent=2))
    build_tokenizer().save_pretrained(out)

    transformer = BagelAdapter(out).empty_transformer()
    shapes = {name: tuple(weight.shape) for name, weight in transformer.named_parameters()}
    stored = {
        name if name.startswith(GENERATION_CORE) else LANGUAGE_MODEL + name: shape
        for name, shape in shapes.items()
    }
    stored |= _other_shapes(BagelSizes.read(out), configs)

    generator = torch.Generator(device).manual_seed(0)
    weights = {name: _drawn(name, shape, generator) for name, shape in stored.items()}
    save_file(weights, out / ROOT_FILE)
    torch.manual_seed(0)
    save_file(_autoencoder(configs["config.json"]), out / "ae.safetensors")
    return sum(map(torch.Size.numel, map(torch.Size, shapes.values())))


def _configs(source: Path, num_layers: int) -> dict[str, dict[str, Any]]:
    """Return file → values: source's, with another number of layers if one is given."""
    names = ("config.json", "llm_config.json", "vit_config.json")
    configs = {name: read_json(source / name) for name in names}
    if num_layers:
        configs["llm_config.json"]["num_hidden_layers"] = num_layers
        configs["config.json"]["llm_config"]["num_hidden_layers"] = num_layers
    side = configs["vit_config.json"]["image_size"]
    configs["preprocessor_config.json"] = {
        "image_processor_type": "SiglipImageProcessor",
        "size": {"height": side, "width": side},
    }
    return configs


def _other_shapes(
    sizes: BagelSizes, configs: dict[str, dict[str, Any]]
) -> dict[str, tuple[int, ...]]:
    """Return what text needs after the last layer, and what given images need."""
    config = SiglipVisionConfig(**configs["vit_config.json"] | {"vision_use_head": False})
    if config.num_hidden_layers == PUBLISHED_LAYERS:  # ema.safetensors lacks the last
        config.num_hidden_layers -= 1
    with torch.device("meta"):
        vision = SiglipVisionModel(config)
    shapes = {
        f"vit_model.vision_model.{name.removeprefix('vision_model.')}": tuple(weight.shape)
        for name, weight in vision.named_parameters()
    }
    width = sizes.width
    return shapes | {
        "connector.fc1.weight": (width, config.hidden_size),
        "connector.fc1.bias": (width,),
        "connector.fc2.weight": (width, width),
        "connector.fc2.bias": (width,),
        "vit_pos_embed.pos_embed": (
            configs["config.json"]["vit_max_num_patch_per_side"] ** 2,
            width,
        ),
        f"{LANGUAGE_MODEL}norm.weight": (width,),
        "language_model.lm_head.weight": (sizes.vocabulary, width),
    }


def _drawn(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return a normal weight [shape], bfloat16 on the CPU; those of norms are around 1."""
    tensor = (
        GAIN
        * shape[-1] ** -0.5
        * torch.randn(shape, generator=generator, device=generator.device, dtype=torch.bfloat16)
    )
    is_norm = name.endswith("weight") and len(shape) == 1
    return (tensor + 1 if is_norm else tensor).cpu()


def _autoencoder(config: dict[str, Any]) -> dict[str, Tensor]:
    """Return the weights of vllm-omni's class, which reads ae.safetensors by its own names."""
    from vllm_omni.diffusion.models.bagel.autoencoder import AutoEncoder
    from vllm_omni.diffusion.models.bagel.pipeline_bagel import default_ae_params

    given = {name: config["vae_config"][name] for name in VAE_SIZES if name in config["vae_config"]}
    state = AutoEncoder(replace(default_ae_params(), **given)).state_dict()
    return {name: weight.bfloat16().contiguous() for name, weight in state.items()}
