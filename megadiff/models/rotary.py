"""Rotate queries and keys in real arithmetic, so that torch.compile can fuse it."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate_pairs(x_BSHD: Tensor, cos_SP: Tensor, sin_SP: Tensor) -> Tensor:
    """Multiply every two features of a token, as a complex number, by the token's rotation.

    x_BSHD: the result is in its dtype, computed in float32. cos_SP, sin_SP: [S, D / 2], for each
    pair of neighbouring features; [B, S, D / 2] where rows differ.
    """
    cos_S1P1 = cos_SP[..., None, :, None]
    sin_S1P2 = torch.stack((-sin_SP, sin_SP), dim=-1).unsqueeze(-3)
    pairs = x_BSHD.float().unflatten(-1, (-1, 2))
    # Each feature reads its neighbour. To take pairs apart and join them again makes a GPU's fused
    # kernel nearly twice as long.
    return (pairs * cos_S1P1 + pairs.flip(-1) * sin_S1P2).flatten(-2).to(x_BSHD.dtype)
