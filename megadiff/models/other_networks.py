"""Count the parameters of networks that models without a diffusers folder hold in their root.

By their configs alone: no weight is read, and a folder needs none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate import init_empty_weights
from torch import nn

# FLUX.1's, which vllm-omni builds for an ae.safetensors whatever config.json says
AUTOENCODER = {
    "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "latent_channels": 16,
    "layers_per_block": 2,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}


def autoencoder_parameters() -> int:
    """Count those of FLUX.1's autoencoder."""
    from diffusers import AutoencoderKL

    with init_empty_weights():
        autoencoder: Any = AutoencoderKL(**AUTOENCODER)
        return _count(autoencoder)


def vision_parameters(config: Mapping[str, Any]) -> int:
    """Count those of a SigLIP vision tower without a head. config: of its vit_config.json."""
    from transformers import SiglipVisionConfig, SiglipVisionModel

    with init_empty_weights():
        values = dict(config) | {"vision_use_head": False}
        return _count(SiglipVisionModel(SiglipVisionConfig(**values)))


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
