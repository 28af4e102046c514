"""Advantage-weighted matching: the clipped policy gradient with the matching error as log_prob.

arXiv 2509.25050.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megadiff.algorithms.match_rows import MATCHING, sum_matches
from megadiff.algorithms.row_sums import ClipRange, clipped_loss, mean_square
from megadiff.types import LossOutput, MatchInputs


def awm(
    inputs: MatchInputs,
    *,
    matching: str,
    clip_range: ClipRange,
    adv_clip_max: float,
    kl_coef: float,
    lagging_kl_coef: float = 0.0,
) -> LossOutput:
    """Sum the weighted max(−A·r, −A·clip(r)) over B, r = exp(log_prob − old log_prob).

    log_prob = −MATCHING[matching](mean((velocity − target)²), sigma), of both policies at the same
    noise. KLs are in velocity space, see sum_matches.
    """

    def log_prob(velocity_BLC: Tensor) -> Tensor:
        error_B = mean_square(velocity_BLC - inputs.target_BLC)
        return -MATCHING[matching](error_B, inputs.sigma_B)

    log_prob_B = log_prob(inputs.velocity_BLC)
    old_BLC = inputs.velocities.get("old")
    old_log_prob_B = log_prob_B.detach() if old_BLC is None else log_prob(old_BLC)
    ratio_B = torch.exp(log_prob_B - old_log_prob_B)

    loss_B, figures = clipped_loss(inputs.advantage_B, ratio_B, clip_range, adv_clip_max)
    return sum_matches(inputs, loss_B, figures, kl_coef=kl_coef, lagging_kl_coef=lagging_kl_coef)
