"""Flow-DPPO: the policy gradient within a limit on the exact KL of a step. arXiv 2606.11025."""

from __future__ import annotations

import torch

from megadiff.algorithms.policy_steps import policy_steps, sum_steps
from megadiff.algorithms.row_sums import mean_square
from megadiff.diffusion import sde
from megadiff.types import LossOutput, StepInputs


def flow_dppo(
    inputs: StepInputs,
    *,
    kl_limit: float,
    adv_clip_max: float,
    kl_coef: float,
    step_weight: str = "none",
) -> LossOutput:
    """Sum the weighted −A·r over B, without the steps that are over the limit and would go on.

    Such a step has mean((mean − old_mean)²) / 2std² >= kl_limit, and A pushes r further from 1.
    The limit is a mean over latent elements, so it need not follow the resolution.
    The other arguments are flow_grpo's.
    """
    steps = policy_steps(inputs)
    ratio_B = steps.ratio_B
    advantage_B = inputs.advantage_B.clamp(-adv_clip_max, adv_clip_max)

    moved_BLC = (steps.mean_BLC - steps.old_mean_BLC).detach()
    kl_B = mean_square(moved_BLC) / (2 * sde.injected_std(steps.step) ** 2)
    goes_on_B = (ratio_B - 1) * advantage_B > 0
    is_masked_B = (kl_B >= kl_limit) & goes_on_B

    loss_B = torch.where(is_masked_B, 0.0, -advantage_B * ratio_B)
    figures = {"policy/clip_fraction": is_masked_B, "policy/ratio_mean": ratio_B}
    return sum_steps(inputs, steps, loss_B, figures, kl_coef=kl_coef, step_weight=step_weight)
