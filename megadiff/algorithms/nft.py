"""DiffusionNFT: learn towards good samples and away from bad ones, along the forward process.

arXiv 2509.16117.
"""

from __future__ import annotations

from torch import Tensor

from megadiff.algorithms.match_rows import sum_matches
from megadiff.algorithms.row_sums import mean_square
from megadiff.types import LossOutput, MatchInputs

SMALLEST_ERROR = 1e-5  # of the clean latents, that an error may be divided by


def nft(
    inputs: MatchInputs, *, beta: float, adv_clip_max: float, kl_coef: float, old: str = "old"
) -> LossOutput:
    """Sum the weighted (adv_clip_max / beta)·(g·E(v⁺) + (1 − g)·E(v⁻)) over B.

    v± = old velocity ± beta·(velocity − old velocity). g in [0, 1] is the advantage, ± adv_clip_max
    mapped to 1 and 0. E is the mean squared error of the clean latents that v implies, over its
    own mean magnitude. old: the name of the old velocity in the inputs; where they bring none, it
    is the policy's own.
    The value does not depend on rewards while old and policy are one; its gradient does.
    """
    velocity_BLC = inputs.velocity_BLC
    old_BLC = inputs.velocities.get(old, velocity_BLC.detach())
    moved_BLC = velocity_BLC - old_BLC
    good_B = (inputs.advantage_B / (2 * adv_clip_max) + 0.5).clamp(0, 1)

    def error(implied_BLC: Tensor) -> Tensor:
        miss_BLC = inputs.sigma_B[:, None, None] * (implied_BLC - inputs.target_BLC)
        magnitude_B = miss_BLC.detach().abs().double().mean(dim=(1, 2)).clamp(min=SMALLEST_ERROR)
        return mean_square(miss_BLC) / magnitude_B

    towards_B = good_B * error(old_BLC + beta * moved_BLC)
    away_B = (1 - good_B) * error(old_BLC - beta * moved_BLC)
    loss_B = adv_clip_max / beta * (towards_B + away_B)
    figures = {"policy/velocity_moved": mean_square(moved_BLC)}
    return sum_matches(inputs, loss_B, figures, kl_coef=kl_coef)
