"""FlowGRPO: the clipped policy gradient over stochastic flow-matching steps. arXiv 2505.05470."""

from __future__ import annotations

from megadiff.algorithms.policy_steps import policy_steps, sum_steps
from megadiff.algorithms.row_sums import ClipRange, clipped_loss
from megadiff.types import LossOutput, StepInputs


def flow_grpo(
    inputs: StepInputs,
    *,
    clip_range: ClipRange,
    adv_clip_max: float,
    kl_coef: float,
    step_weight: str = "none",
) -> LossOutput:
    """Sum the weighted w·max(−A·r, −A·clip(r)) + kl_coef·KL over B.

    A: advantage, within ± adv_clip_max. r = exp(log_prob − old_log_prob), log_prob a mean over
    latent elements. w, KL(policy ‖ reference) in mean space and r's old policy: see policy_steps.
    """
    steps = policy_steps(inputs)
    loss_B, figures = clipped_loss(inputs.advantage_B, steps.ratio_B, clip_range, adv_clip_max)
    return sum_steps(inputs, steps, loss_B, figures, kl_coef=kl_coef, step_weight=step_weight)
