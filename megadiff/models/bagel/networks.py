"""Size what a BAGEL folder holds beside its transformer, by its configs alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelerate import init_empty_weights

from megadiff.models.bagel.transformer import BagelSizes
from megadiff.tensors.model_files import read_json

# vllm-omni builds this autoencoder, FLUX.1's, whatever config.json says
AUTOENCODER = {
    "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "latent_channels": 16,
    "layers_per_block": 2,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
PUBLISHED_LAYERS = 27  # of the vision tower, the last of which is not used
PATCHES_A_SIDE = 70  # default of vit_max_num_patch_per_side


def other_networks(folder: Path, sizes: BagelSizes) -> dict[str, int]:
    """Return name → parameters of what a replica loads besides. No weight is read.

    Raises ValueError where a config is missing.
    """
    from diffusers import AutoencoderKL
    from transformers import SiglipVisionConfig, SiglipVisionModel

    values = read_json(folder / "vit_config.json")
    vision_config = SiglipVisionConfig(**values | {"vision_use_head": False})
    if vision_config.num_hidden_layers == PUBLISHED_LAYERS:
        vision_config.num_hidden_layers -= 1
    with init_empty_weights():
        vision = SiglipVisionModel(vision_config)
        autoencoder = AutoencoderKL(**AUTOENCODER)

    width = sizes.width
    side = read_json(folder / "config.json").get("vit_max_num_patch_per_side", PATCHES_A_SIDE)
    # two linear layers with their biases, and a table of positions
    connector = (vision_config.hidden_size + 1) * width + (width + 1) * width + side**2 * width
    return {
        # for the text that the model writes
        "language head": sizes.vocabulary * width + width,
        "vision tower": _count(vision) + connector,
        "autoencoder": _count(autoencoder),
    }


def _count(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
