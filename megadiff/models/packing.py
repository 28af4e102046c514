"""Pack latents to [B, L, C]; a token is 1×2×2 latents, as in most families' transformers.

So L is the transformer's sequence length. Tokens of one frame follow each other row by row, and the
first frame's come first. log_prob, a mean over all elements, is the same in either shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

PATCH = 2  # latents a token, along height and along width; along time one


@dataclass(frozen=True, kw_only=True)
class TokenGrid:
    """Count tokens along time, height and width."""

    frames: int
    rows: int
    columns: int

    @property
    def tokens_per_frame(self) -> int:
        return self.rows * self.columns

    @property
    def num_tokens(self) -> int:
        return self.frames * self.tokens_per_frame


def pack(latents_BCFHW: Tensor) -> Tensor:
    """Pack [B, C, F, 2h, 2w] to [B, F·h·w, 4C]."""
    # [B, C, F, h, 2, w, 2]
    patches = latents_BCFHW.unflatten(4, (-1, PATCH)).unflatten(3, (-1, PATCH))
    return patches.permute(0, 2, 3, 5, 1, 4, 6).flatten(4).flatten(1, 3)


def pad_rows(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return rows [tokens, …] of several lengths as [B, tokens, …], and the mask [B, tokens]."""
    padded_BT = pad_sequence(list(rows), batch_first=True)
    lengths_B = torch.tensor([len(row_T) for row_T in rows], device=padded_BT.device)
    columns_T = torch.arange(padded_BT.shape[1], device=padded_BT.device)
    return padded_BT, columns_T < lengths_B[:, None]


def unpack(latents_BLC: Tensor, grid: TokenGrid) -> Tensor:
    """Unpack to [B, C, F, 2h, 2w]; L = grid.num_tokens."""
    # [B, F, h, w, C, 2, 2]
    patches = latents_BLC.unflatten(2, (-1, PATCH, PATCH)).unflatten(
        1, (grid.frames, grid.rows, grid.columns)
    )
    return patches.permute(0, 4, 1, 2, 5, 3, 6).flatten(5).flatten(3, 4)
