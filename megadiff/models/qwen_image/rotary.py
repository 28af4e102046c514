"""Rotate Qwen-Image's queries and keys in real arithmetic.

torch.compile fuses it, but leaves every complex product a kernel of its own.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from megadiff.models.rotary import rotate_pairs


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

    return rotate_pairs(x_BSHD, *rotation_SD.unbind(-1))


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
