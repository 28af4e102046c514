"""Rotate Qwen-Image's queries and keys in real arithmetic.

torch.compile fuses it, but leaves every complex product a kernel of its own.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor


def rotate(x_BSHD: Tensor, rotation_SD: Tensor, use_real: bool = False) -> Tensor:
    """Multiply every two features of a token, as a complex number, by the token's rotation.

    x_BSHD: the result is in its dtype, computed in float32. rotation_SD: [S, D / 2] complex, or its
    torch.view_as_real; [B, S, …] where rows differ. Values and arguments are those of diffusers'
    apply_rotary_emb_qwen with use_real=False.
    """
    if use_real:
        raise ValueError(
            "use_real=True: rotations as cosines and sines of all features are not what this "
            "model's tables are"
        )
    if rotation_SD.is_complex():
        rotation_SD = torch.view_as_real(rotation_SD)

    # neighbouring features are a number's real and imaginary part
    cos_S1D, sin_S1D = (table_SD.unsqueeze(-2) for table_SD in rotation_SD.unbind(-1))
    real, imaginary = x_BSHD.float().unflatten(-1, (-1, 2)).unbind(-1)
    rotated = (real * cos_S1D - imaginary * sin_S1D, real * sin_S1D + imaginary * cos_S1D)
    return torch.stack(rotated, dim=-1).flatten(-2).to(x_BSHD.dtype)


def rotate_in_real(transformer: Any) -> None:
    """Make the transformer's attention call `rotate`, in all of this process."""
    for block in transformer.transformer_blocks:
        # processors look the function up in their own module, at every call
        namespace: Any = sys.modules[type(block.attn.processor).__module__]
        if not hasattr(namespace, "apply_rotary_emb_qwen"):
            raise ValueError(
                f"{namespace.__name__} has no apply_rotary_emb_qwen, so its rotations are not "
                "known here"
            )
        namespace.apply_rotary_emb_qwen = rotate
