"""Rotary positions of Qwen-Image in real arithmetic: torch.compile fuses it, but leaves every complex product a kernel of its
own."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn


def rotate(x_BSHD: Tensor, rotation_SD: Tensor, use_real: bool = False) -> Tensor:
    """[B, S, H, D] in x's dtype: every two features of a token as a complex number, times the token's rotation [S, D / 2].

    The values and arguments of diffusers' apply_rotary_emb_qwen with use_real=False; computed in float32. rotation_SD: complex,
    or its torch.view_as_real.
    """
    if use_real:
        raise ValueError(
            "use_real=True: rotations as cosines and sines of all features are not what this model's tables are"
        )
    if rotation_SD.is_complex():
        rotation_SD = torch.view_as_real(rotation_SD)
    cos_S1D, sin_S1D = (each_SD[:, None] for each_SD in rotation_SD.unbind(-1))
    real, imaginary = x_BSHD.float().unflatten(-1, (-1, 2)).unbind(-1)
    rotated = (real * cos_S1D - imaginary * sin_S1D, real * sin_S1D + imaginary * cos_S1D)
    return torch.stack(rotated, dim=-1).flatten(-2).to(x_BSHD.dtype)


def rotate_in_real(transformer: nn.Module) -> None:
    """What the transformer's attention calls, for all of this process."""
    for block in transformer.transformer_blocks:
        namespace = sys.modules[type(block.attn.processor).__module__]
        if not hasattr(namespace, "apply_rotary_emb_qwen"):
            raise ValueError(
                f"{namespace.__name__} has no apply_rotary_emb_qwen, so its rotations are not known here"
            )
        namespace.apply_rotary_emb_qwen = rotate
