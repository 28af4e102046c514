"""Encode pixels by a family's VAE: one function for trainer and replica."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megadiff.models.packing import pack
from megadiff.types import ImageSize


@torch.no_grad()
def encode_pixels(vae: Any, pixels_BFHWC: Tensor) -> Tensor:
    """Encode uint8 RGB videos to packed, normalised latents [B, L, C] float32.

    F is 1 for images, for videos 1 + a multiple of the VAE's temporal factor. Latents stay on the
    VAE's device. The VAE is causal: one frame alone is encoded as the first of a video is.
    """
    device = next(vae.parameters()).device
    scaled_BCFHW = pixels_BFHWC.to(device).permute(0, 4, 1, 2, 3).float() / 127.5 - 1
    # The mean of its posterior, as WanImageToVideoPipeline takes it. A sample would add noise that
    # training had to learn.
    latents_BCFHW = vae.encode(scaled_BCFHW.to(vae.dtype)).latent_dist.mode().float()
    mean, std = latent_statistics(vae, device)
    return pack((latents_BCFHW - mean) / std)


def encode_images(vae: Any, pixels: Tensor) -> Tensor:
    """Encode uint8 images [B, H, W, 3], or videos as encode_pixels() does."""
    # an image is a video of one frame
    return encode_pixels(vae, pixels[:, None] if pixels.ndim == 4 else pixels)


def pixels_of(images: Sequence[bytes], sizes: Sequence[ImageSize]) -> list[Tensor]:
    """Return a request's images as uint8 tensors [H, W, 3]."""
    return [
        # a copy: frombuffer wants memory that can be written to
        torch.frombuffer(bytearray(image), dtype=torch.uint8).view(*size, 3)
        for image, size in zip(images, sizes, strict=True)
    ]


def latent_statistics(vae: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (mean, standard deviation), each [1, C, 1, 1, 1] float32."""
    mean, std = (
        torch.tensor(vae.config[f"latents_{name}"], device=device) for name in ("mean", "std")
    )
    return mean.view(1, -1, 1, 1, 1), std.view(1, -1, 1, 1, 1)
