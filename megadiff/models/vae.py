"""Turn pixels into latents and back by a family's VAE: one function for trainer and replica.

Video VAEs (Qwen-Image's, Wan's) have statistics of each channel and take [B, C, F, H, W]. Image
VAEs (AutoencoderKL: SD3, Z-Image, FLUX) have one shift and one scale and take [B, C, H, W].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megadiff.models.packing import pack
from megadiff.types import ImageSize

PINNED_BYTES = 2**26  # of pixels: 85 images of 512²


@torch.no_grad()
def encode_images(vae: Any, pixels: Tensor) -> Tensor:
    """Encode uint8 RGB [B, H, W, 3] or [B, F, H, W, 3] to packed, normalised latents [B, L, C].

    They are float32 and stay on the VAE's device. F is 1 + a multiple of the VAE's temporal factor.
    The VAE is causal: one frame alone is encoded as the first of a video is.
    """
    # an image is a video of one frame
    pixels_BFHWC = pixels[:, None] if pixels.ndim == 4 else pixels
    device = next(vae.parameters()).device
    scaled_BCFHW = pixels_BFHWC.to(device).permute(0, 4, 1, 2, 3).float() / 127.5 - 1
    # The mean of its posterior, as WanImageToVideoPipeline takes it. A sample would add noise that
    # training had to learn.
    latents_BCFHW = _with_frames(
        vae, scaled_BCFHW, lambda scaled: vae.encode(scaled).latent_dist.mode()
    )
    mean, std = latent_statistics(vae, device)
    return pack((latents_BCFHW.float() - mean) / std)


@torch.no_grad()
def decode_latents(vae: Any, latents_NCFHW: Tensor, *, num_rows: int) -> Tensor:
    """Decode normalised latents to uint8 RGB [N, F, H, W, 3] on the CPU.

    num_rows: samples a call of the VAE, whose activations take hundreds of times a sample's memory.
    """
    mean, std = latent_statistics(vae, latents_NCFHW.device)
    on_gpu = latents_NCFHW.is_cuda
    rows = []
    for latents_BCFHW in (latents_NCFHW.float() * std + mean).split(num_rows):
        decoded = _with_frames(
            vae, latents_BCFHW, lambda latents: vae.decode(latents, return_dict=False)[0]
        )
        pixels = to_uint8(decoded).permute(0, 2, 3, 4, 1).contiguous()
        # To the CPU as they come: pixels of long videos take memory, too. The host does not wait
        # for pinned memory, and starts the next rows. torch never gives it back: few bytes only.
        is_pinned = on_gpu and pixels.nbytes <= PINNED_BYTES
        rows.append(torch.empty(pixels.shape, dtype=pixels.dtype, pin_memory=is_pinned))
        rows[-1].copy_(pixels, non_blocking=True)
    if on_gpu:
        torch.cuda.current_stream(latents_NCFHW.device).synchronize()
    return torch.cat(rows)


def pixels_of(images: Sequence[bytes], sizes: Sequence[ImageSize]) -> tuple[Tensor, ...]:
    """Return a request's images as uint8 tensors [H, W, 3]."""
    return tuple(
        # a copy: frombuffer wants memory that can be written to
        torch.frombuffer(bytearray(image), dtype=torch.uint8).view(*size, 3)
        for image, size in zip(images, sizes, strict=True)
    )


def latent_statistics(vae: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (mean, standard deviation) of latents, each [1, C or 1, 1, 1, 1] float32."""
    if _takes_frames(vae):
        mean = torch.tensor(vae.config["latents_mean"], device=device)
        std = torch.tensor(vae.config["latents_std"], device=device)
    else:
        mean = torch.tensor([vae.config["shift_factor"] or 0.0], device=device)
        std = torch.tensor([1 / vae.config["scaling_factor"]], device=device)
    return mean.view(1, -1, 1, 1, 1), std.view(1, -1, 1, 1, 1)


def to_uint8(values: Tensor) -> Tensor:
    """Turn a decoder's values in [-1, 1] into uint8, rounded as the stock images are."""
    scaled = (values.float() * 0.5 + 0.5).clamp(0, 1) * 255
    return scaled.round().to(torch.uint8)


def _takes_frames(vae: Any) -> bool:
    return "latents_mean" in vae.config and vae.config["latents_mean"] is not None


def _with_frames(vae: Any, values_BCFHW: Tensor, function: Any) -> Tensor:
    """Apply the VAE's function in its dtype; image VAEs get the only frame."""
    if _takes_frames(vae):
        return function(values_BCFHW.to(vae.dtype))
    return function(values_BCFHW.squeeze(2).to(vae.dtype)).unsqueeze(2)
