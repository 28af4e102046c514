"""Flow matching on straight paths from noise to image, plain and weighted by reward."""

from __future__ import annotations

import torch

from megadiff.algorithms.match_rows import sum_matches
from megadiff.algorithms.row_sums import mean_square
from megadiff.types import LossOutput, MatchInputs


def flow_matching(inputs: MatchInputs) -> LossOutput:
    """Sum the weighted mean((velocity − (noise − latents))²) over B, in float32.

    The mean is over tokens and channels. arXiv 2210.02747.
    """
    error_B = (inputs.velocity_BLC - inputs.target_BLC).square().mean(dim=(1, 2))
    loss_sum = (error_B * inputs.weight_B).sum()
    return LossOutput(loss_sum=loss_sum, sums={"loss/flow_matching": loss_sum.detach()})


def weighted_matching(
    inputs: MatchInputs, *, temperature: float, adv_clip_max: float, kl_coef: float
) -> LossOutput:
    """Sum the weighted exp(A / temperature)·mean((velocity − target)²) over B.

    No sample is pushed away. Reward-weighted regression, as in Flow-GRPO's stat_tracking.
    """
    advantage_B = inputs.advantage_B.clamp(-adv_clip_max, adv_clip_max)
    error_B = mean_square(inputs.velocity_BLC - inputs.target_BLC)
    loss_B = torch.exp(advantage_B / temperature) * error_B
    return sum_matches(inputs, loss_B, {}, kl_coef=kl_coef)
