"""What an adapter draws with a transformer, by Euler's steps alone."""

from __future__ import annotations

import torch
from torch import Tensor

from megadiff.models.adapter import ModelAdapter
from megadiff.models.packing import pack, unpack
from megadiff.types import Sampling, Tensors


@torch.no_grad()
def trajectory(
    adapter: ModelAdapter,
    transformer: torch.nn.Module,
    sampling: Sampling,
    texts: Tensors,
    noise_BCHW: Tensor,
) -> Tensor:
    """Return the latents [B, C, H, W] at sigma 0 by the adapter's velocity and schedule."""
    schedule = adapter.schedule(sampling)
    latents_BLC = pack(noise_BCHW.unsqueeze(2))
    for sigma, sigma_next in zip(schedule[:-1], schedule[1:], strict=True):
        sigma_B = sigma.expand(len(latents_BLC))
        velocity_BLC = adapter.velocity(transformer, latents_BLC, sigma_B, texts, sampling)
        latents_BLC = latents_BLC + (sigma_next - sigma) * velocity_BLC
    return unpack(latents_BLC, adapter.grid(sampling)).squeeze(2)
