"""FlowGRPO: the clipped policy gradient over stochastic flow-matching steps. arXiv 2505.05470."""

from __future__ import annotations

import torch
from torch import Tensor

from megadiff.diffusion import sde
from megadiff.types import LossOutput, StepInputs

IMPORTANCE_CAP = 2.0  # a step that the replica all but excluded would else rule the batch


def flow_grpo(
    inputs: StepInputs, *, clip_range: float, adv_clip_max: float, kl_coef: float
) -> LossOutput:
    """Sum the weighted w·max(−A·r, −A·clip(r, 1 ± clip_range)) + kl_coef·KL over B.

    A: advantage, within ± adv_clip_max. r = exp(log_prob − old_log_prob), log_prob a mean over
    latent elements; without an old_log_prob it is log_prob's own value, r = 1.
    w: importance_weights of old_log_prob and rollout_log_prob, 1 without the latter.
    KL(policy ‖ reference) in mean space; it needs ref_mean_BLC.
    """
    step = sde.SdeStep(inputs.sampling, inputs.schedule, inputs.sigma_B, inputs.sigma_next_B)
    mean_BLC = sde.step_mean(step, inputs.latents_BLC, inputs.velocity_BLC)
    log_prob_B = sde.log_prob(step, inputs.prev_sample_BLC, mean_BLC)
    old_log_prob_B = log_prob_B.detach() if inputs.old_log_prob_B is None else inputs.old_log_prob_B
    log_ratio_B = log_prob_B - old_log_prob_B
    ratio_B = torch.exp(log_ratio_B)

    advantage_B = inputs.advantage_B.clamp(-adv_clip_max, adv_clip_max)
    clipped_B = ratio_B.clamp(1 - clip_range, 1 + clip_range)
    # the larger loss: clipping may never make a step look better than it is
    loss_B = torch.maximum(-advantage_B * ratio_B, -advantage_B * clipped_B)

    sums = {
        "policy/clip_fraction": (ratio_B - 1).abs() > clip_range,
        # the k2 estimator; k1 is as noisy as it is large here
        "policy/kl_old": 0.5 * log_ratio_B**2,
        "policy/ratio_mean": ratio_B,
    }

    if inputs.rollout_log_prob_B is not None:
        importance_B = importance_weights(old_log_prob_B, inputs.rollout_log_prob_B)
        loss_B = loss_B * importance_B
        sums["policy/importance_mean"] = importance_B

    if kl_coef:
        assert inputs.ref_mean_BLC is not None
        kl_B = sde.kl_to_reference(step, mean_BLC, inputs.ref_mean_BLC)
        loss_B = loss_B + kl_coef * kl_B
        sums["policy/kl_ref"] = kl_B

    sums["loss/policy"] = loss_B
    # sums, not means: the engine divides by the batch's global denominator
    weighted = {name: (value_B.detach() * inputs.weight_B).sum() for name, value_B in sums.items()}
    return LossOutput(loss_sum=(loss_B * inputs.weight_B).sum(), sums=weighted)


def importance_weights(old_log_probs: Tensor, rollout_log_probs: Tensor) -> Tensor:
    """Return min(exp(old − rollout), IMPORTANCE_CAP).

    Truncated importance sampling between a replica's arithmetic and the trainer's.
    arXiv 2110.00641 splits the two policies.
    """
    return torch.exp(old_log_probs - rollout_log_probs).clamp(max=IMPORTANCE_CAP)
