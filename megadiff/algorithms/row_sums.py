"""Share what all losses do with their rows: clip ratios, and sum what rows weigh."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megadiff.types import LossOutput

ClipRange = tuple[float, float]  # below 1, above 1


def clipped_loss(
    advantage_B: Tensor, ratio_B: Tensor, clip_range: ClipRange, adv_clip_max: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return max(−A·ratio, −A·clip(ratio)), [B], and the ratio's figures, [B] by their names.

    A is within ± adv_clip_max. PPO, arXiv 1707.06347.
    """
    advantage_B = advantage_B.clamp(-adv_clip_max, adv_clip_max)
    low = 1 - clip_range[0]
    high = 1 + clip_range[1]
    # the larger loss: clipping may never make a row look better than it is
    loss_B = torch.maximum(-advantage_B * ratio_B, -advantage_B * ratio_B.clamp(low, high))
    is_clipped_B = (ratio_B < low) | (ratio_B > high)
    return loss_B, {"policy/clip_fraction": is_clipped_B, "policy/ratio_mean": ratio_B}


def mean_square(value_BLC: Tensor) -> Tensor:
    """Return the mean over tokens and channels, [B] float64: ratios of it are close to 1."""
    return value_BLC.square().double().mean(dim=(1, 2))


def sum_rows(loss_B: Tensor, figures: Mapping[str, Tensor], weight_B: Tensor) -> LossOutput:
    """Sum the weighted rows of the loss and of the figures, which are [B] by their names.

    The loss is among the figures as loss/policy.
    """
    rows = {**figures, "loss/policy": loss_B}
    # sums, not means: the engine divides by the batch's global denominator
    sums = {name: (value_B.detach() * weight_B).sum() for name, value_B in rows.items()}
    return LossOutput(loss_sum=(loss_B * weight_B).sum(), sums=sums)
