"""Norms of Wan's VAE in a replica, as the trainer's and diffusers' compute."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn


def use_stock_norms(vae: nn.Module, norm_class: type[nn.Module]) -> None:
    """Make vllm-omni's norms compute what diffusers' WanRMS_norm does, in place.

    vllm-omni puts norm_class in place of that class, and decodes under autocast. There its norms
    answer in float32, as then does all that follows. For two videos of 17 frames at 480 × 832 a run
    took 14.5 GiB on an H200, the stock decoder alone 8.5.
    """
    for module in vae.modules():
        if isinstance(module, norm_class):
            module.forward = partial(stock_norm, module)


def stock_norm(norm: Any, values: Tensor) -> Tensor:
    """Normalise in float32 and answer in the dtype of values, [B, C, …] or [B, …, C]."""
    unit = F.normalize(values.float(), dim=1 if norm.channel_first else -1).to(values.dtype)
    scaled = unit * norm.scale * norm.gamma
    return scaled if norm.bias is None else scaled + norm.bias
