"""Share what losses over stored stochastic steps need: means, log_probs and the weights of rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megadiff.algorithms.row_sums import sum_rows
from megadiff.diffusion import sde
from megadiff.types import LossOutput, StepInputs

IMPORTANCE_CAP = 2.0  # a step that the replica all but excluded would else rule the batch


@dataclass(frozen=True, kw_only=True)
class PolicySteps:
    """Hold B steps under the policy, with gradient, and under the old one, without.

    mean_BLC, old_mean_BLC: of p(prev_sample | latents). old_mean_BLC is that of the policy itself
    where the inputs bring no old velocity. log_prob_B, old_log_prob_B: float64.
    """

    step: sde.SdeStep
    mean_BLC: Tensor
    log_prob_B: Tensor
    old_mean_BLC: Tensor
    old_log_prob_B: Tensor

    @property
    def ratio_B(self) -> Tensor:
        return torch.exp(self.log_prob_B - self.old_log_prob_B)


def policy_steps(inputs: StepInputs) -> PolicySteps:
    """Compute means and log_probs of the stored steps.

    Old log_probs are those of the inputs' old velocity, else their old_log_prob_B, else the
    policy's own, which makes the ratio 1.
    """
    step = sde.SdeStep(inputs.sampling, inputs.schedule, inputs.sigma_B, inputs.sigma_next_B)
    mean_BLC = sde.step_mean(step, inputs.latents_BLC, inputs.velocity_BLC)
    log_prob_B = sde.log_prob(step, inputs.prev_sample_BLC, mean_BLC)

    old_mean_BLC = mean_BLC.detach()
    old_log_prob_B = log_prob_B.detach() if inputs.old_log_prob_B is None else inputs.old_log_prob_B
    if "old" in inputs.velocities:
        old_mean_BLC = sde.step_mean(step, inputs.latents_BLC, inputs.velocities["old"])
        old_log_prob_B = sde.log_prob(step, inputs.prev_sample_BLC, old_mean_BLC)

    return PolicySteps(
        step=step,
        mean_BLC=mean_BLC,
        log_prob_B=log_prob_B,
        old_mean_BLC=old_mean_BLC,
        old_log_prob_B=old_log_prob_B,
    )


def sum_steps(
    inputs: StepInputs,
    steps: PolicySteps,
    loss_B: Tensor,
    figures: dict[str, Tensor],
    *,
    kl_coef: float,
    step_weight: str,
) -> LossOutput:
    """Weigh the loss's rows, add kl_coef times the KL to the reference, and sum.

    A row counts by its importance where the inputs bring rollout_log_prob_B. step_weight=level: and
    by its injected std over the mean of those that windows reach. TempFlow-GRPO, arXiv 2508.04324.
    """
    figures["policy/kl_old"] = 0.5 * (steps.log_prob_B - steps.old_log_prob_B) ** 2  # k2 estimator

    if inputs.rollout_log_prob_B is not None:
        # truncated importance sampling between a replica's arithmetic and the trainer's;
        # arXiv 2110.00641 splits the two policies
        gap_B = steps.old_log_prob_B - inputs.rollout_log_prob_B
        importance_B = gap_B.exp().clamp(max=IMPORTANCE_CAP)
        loss_B = loss_B * importance_B
        figures |= {"policy/importance_mean": importance_B, "policy/log_prob_gap_mean": gap_B.abs()}

    if step_weight == "level":
        low, high = inputs.sampling.sde_window_range
        sigma_W = inputs.schedule[low:high]
        sigma_next_W = inputs.schedule[low + 1 : high + 1]
        window = sde.SdeStep(inputs.sampling, inputs.schedule, sigma_W, sigma_next_W)
        loss_B = loss_B * (sde.injected_std(steps.step) / sde.injected_std(window).mean())

    if kl_coef:
        ref_mean_BLC = sde.step_mean(steps.step, inputs.latents_BLC, inputs.velocities["reference"])
        kl_B = sde.kl_to_reference(steps.step, steps.mean_BLC, ref_mean_BLC)
        loss_B = loss_B + kl_coef * kl_B
        figures["policy/kl_ref"] = kl_B

    return sum_rows(loss_B, figures, inputs.weight_B)
