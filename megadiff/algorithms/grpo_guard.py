"""GRPO-Guard: FlowGRPO with a ratio of equal mean and spread at all steps. arXiv 2510.22319."""

from __future__ import annotations

import torch

from megadiff.algorithms.policy_steps import policy_steps, sum_steps
from megadiff.algorithms.row_sums import ClipRange, clipped_loss
from megadiff.diffusion import sde
from megadiff.types import LossOutput, StepInputs


def grpo_guard(
    inputs: StepInputs,
    *,
    clip_range: ClipRange,
    adv_clip_max: float,
    kl_coef: float,
    step_weight: str = "none",
) -> LossOutput:
    """Sum the weighted max(−A·r, −A·clip(r)) / (sigma − sigma_next) over B, r = exp(z).

    z = (log_prob − old_log_prob + mean((mean − old_mean)²) / 2std²)·std. It equals the mean of
    noise ⊙ (mean − old_mean), the noise being what the old policy's step drew, in units of std.
    The other arguments are flow_grpo's.
    """
    steps = policy_steps(inputs)
    std_B = sde.injected_std(steps.step)
    # so computed, no two near-equal numbers are subtracted
    noise_BLC = (inputs.prev_sample_BLC - steps.old_mean_BLC) / std_B[:, None, None]
    moved_BLC = (noise_BLC * (steps.mean_BLC - steps.old_mean_BLC)).double()
    ratio_B = torch.exp(moved_BLC.mean(dim=(1, 2)))

    loss_B, figures = clipped_loss(inputs.advantage_B, ratio_B, clip_range, adv_clip_max)
    loss_B = loss_B / (inputs.sigma_B - inputs.sigma_next_B)
    return sum_steps(inputs, steps, loss_B, figures, kl_coef=kl_coef, step_weight=step_weight)
