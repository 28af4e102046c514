"""Compute Wan's velocity from packed latents: one function for trainer and replica."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megadiff.diffusion.guidance import plain_cfg
from megadiff.models.adapter import IMAGE_LATENTS, Conditioning, encoded_text
from megadiff.models.packing import TokenGrid, pack, unpack

# the text's width in every forward; beyond the prompt zeros, which the model attends to
TEXT_TOKENS = 512


def wan_velocity(
    transformer: Any,
    latents_BLC: Tensor,
    timestep_B: Tensor,
    conditioning: Conditioning,
    *,
    grid: TokenGrid,
    guidance_scale: float,
) -> Tensor:
    """Return the guided velocity [B, L, C] float32.

    transformer: diffusers' class or vllm-omni's. timestep_B: [B] float32 in [0, 1000].
    conditioning: prompt_embeds [B, tokens, D], prompt_mask [B, tokens], and the same with negative_
    in front where guidance_scale > 1; image_latents [B, grid.tokens_per_frame, C] where the first
    frame is given. Then latents_BLC are the tokens of the other frames. The transformer sees the
    given ones, clean, at timestep 0, and their velocity is left out.
    Guidance is computed in the transformer's output dtype.
    """
    first_BLC = conditioning.get(IMAGE_LATENTS)
    num_given = 0
    timestep = timestep_B
    if first_BLC is not None:
        first_BLC = first_BLC.to(latents_BLC)
        num_given = first_BLC.shape[1]
        # a timestep for each token: 0 says that the given ones are clean
        clean_BL = timestep_B.new_zeros(first_BLC.shape[:2])
        drawn_BL = timestep_B[:, None].expand(latents_BLC.shape[:2])
        timestep = torch.cat([clean_BL, drawn_BL], dim=1)
        latents_BLC = torch.cat([first_BLC, latents_BLC], dim=1)

    video_BCFHW = unpack(latents_BLC, grid).to(transformer.dtype)

    def one_pass(prefix: str) -> Tensor:
        (velocity_BCFHW,) = transformer(
            hidden_states=video_BCFHW,
            timestep=timestep.to(video_BCFHW.device),
            encoder_hidden_states=_text(conditioning, prefix, video_BCFHW.device).to(video_BCFHW),
            return_dict=False,
        )[:1]
        return pack(velocity_BCFHW)[:, num_given:]

    velocity_BLC = one_pass("")
    if guidance_scale > 1:
        velocity_BLC = plain_cfg(velocity_BLC, one_pass("negative_"), guidance_scale)
    return velocity_BLC.float()


def _text(conditioning: Conditioning, prefix: str, device: torch.device) -> Tensor:
    """Return [B, TEXT_TOKENS, D] on the device, zero beyond each row's own tokens.

    Raises ValueError when the embeddings are absent or too long.
    """
    embeds_BTD, mask_BT = (
        tensor.to(device, non_blocking=True) for tensor in encoded_text(conditioning, prefix)
    )
    num_tokens = embeds_BTD.shape[1]
    if num_tokens > TEXT_TOKENS:
        raise ValueError(
            f"{prefix}prompt_embeds has {num_tokens} tokens, the model takes {TEXT_TOKENS}; "
            "shorten the prompt"
        )

    embeds_BTD = embeds_BTD * mask_BT.to(embeds_BTD)[:, :, None]
    return functional.pad(embeds_BTD, (0, 0, 0, TEXT_TOKENS - num_tokens))
