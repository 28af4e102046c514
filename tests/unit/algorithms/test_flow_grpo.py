"""The gradient on policy, and what importance weighs; test_golden.py has the other values."""

import math
from dataclasses import replace

import pytest
import torch

from megadiff.algorithms.flow_grpo import flow_grpo
from megadiff.diffusion import sde
from megadiff.types import Sampling, StepInputs

SCHEDULE = torch.tensor([1.0, 0.8, 0.5, 0.2, 0.0])
SAMPLING = Sampling(height=32, width=32, num_inference_steps=4)
ARGS = {"clip_range": (1e-4, 1e-4), "adv_clip_max": 5.0, "kl_coef": 0.0}


def _step(sigma, sigma_next):
    return sde.SdeStep(SAMPLING, SCHEDULE, sigma, sigma_next)


def _inputs(ref_shift=None):
    generator = torch.Generator().manual_seed(0)
    latents, velocity, noise = (torch.randn(3, 4, 8, generator=generator) for _ in range(3))
    velocity.requires_grad_()
    sigma, sigma_next = SCHEDULE[1:4], SCHEDULE[2:5]
    sigma, sigma_next = sigma[[0, 1, 0]], sigma_next[[0, 1, 0]]
    step = _step(sigma, sigma_next)
    prev, log_prob = sde.sde_step(step, latents, velocity.detach(), noise)
    # by as much velocity as moves the mean by ref_shift
    zero = torch.zeros_like(latents)
    slope = sde.step_mean(step, zero, torch.ones_like(latents))
    velocities = {} if ref_shift is None else {"reference": velocity.detach() + ref_shift / slope}
    return StepInputs(
        latents_BLC=latents,
        prev_sample_BLC=prev,
        velocity_BLC=velocity,
        sigma_B=sigma,
        sigma_next_B=sigma_next,
        old_log_prob_B=log_prob,
        advantage_B=torch.tensor([1.0, -2.0, 0.5]),
        weight_B=torch.ones(3),
        schedule=SCHEDULE,
        sampling=SAMPLING,
        velocities=velocities,
    )


def test_on_policy():
    inputs = _inputs()
    output = flow_grpo(inputs, **ARGS)
    assert output.loss_sum.item() == pytest.approx(0.5, abs=1e-5)  # −ΣA at ratio 1
    assert output.sums["policy/clip_fraction"] == 0
    assert output.sums["policy/kl_old"] < 1e-10
    output.loss_sum.backward()
    gradient = inputs.velocity_BLC.grad
    again = _inputs()
    step = _step(again.sigma_B, again.sigma_next_B)
    mean = sde.step_mean(step, again.latents_BLC, again.velocity_BLC)
    log_prob = sde.log_prob(step, again.prev_sample_BLC, mean)
    # REINFORCE: at ratio 1 the gradient is that of −A·log_prob
    (-(again.advantage_B * log_prob).sum()).backward()
    torch.testing.assert_close(gradient, again.velocity_BLC.grad, rtol=1e-4, atol=1e-7)


def test_importance_weighs_the_policy_gradient_alone():
    """As a sample counts that the old policy was half as likely to draw as the replica was."""
    inputs, weights = _inputs(ref_shift=0.1), torch.tensor([0.5, 1.0, 2.0])
    inputs = replace(inputs, rollout_log_prob_B=inputs.old_log_prob_B - weights.log())
    output = flow_grpo(inputs, **ARGS | {"kl_coef": 0.04})
    plain = flow_grpo(_inputs(ref_shift=0.1), **ARGS | {"kl_coef": 0.04})
    policy = (weights * torch.tensor([-1.0, 2.0, -0.5])).sum().item()  # −A at ratio 1
    assert output.loss_sum.item() == pytest.approx(
        policy + 0.04 * plain.sums["policy/kl_ref"].item(), abs=1e-5
    )
    assert output.sums["policy/importance_mean"].item() == pytest.approx(3.5)
    gaps = output.sums["policy/log_prob_gap_mean"].item()
    assert gaps == pytest.approx(2 * math.log(2), abs=1e-5)  # the signs of the two do not cancel
    assert not {"policy/importance_mean", "policy/log_prob_gap_mean"} & set(plain.sums)


@pytest.mark.parametrize("kl_coef", [0.0, 0.04])
def test_without_an_old_log_prob_it_is_that_of_the_forward_itself(kl_coef):
    """To the bit as if it had been given, in value and gradient."""
    outputs, gradients = [], []
    for is_given in (False, True):
        inputs = _inputs(ref_shift=0.1)
        rollout_B = inputs.old_log_prob_B - torch.tensor([-0.3, 0.2, 5.0])
        old_B = _own_log_prob(inputs) if is_given else None
        inputs = replace(inputs, old_log_prob_B=old_B, rollout_log_prob_B=rollout_B)
        outputs.append(flow_grpo(inputs, **ARGS | {"kl_coef": kl_coef}))
        outputs[-1].loss_sum.backward()
        gradients.append(inputs.velocity_BLC.grad)
    assert torch.equal(*gradients) and gradients[0].any()
    assert outputs[0].sums == outputs[1].sums
    sums = outputs[0].sums
    assert sums["policy/ratio_mean"] == 3
    assert sums["policy/kl_old"] == sums["policy/clip_fraction"] == 0
    expected = math.exp(-0.3) + math.exp(0.2) + 2  # the third is truncated
    assert sums["policy/importance_mean"].item() == pytest.approx(expected, rel=1e-5)


def _own_log_prob(inputs):
    step = _step(inputs.sigma_B, inputs.sigma_next_B)
    mean = sde.step_mean(step, inputs.latents_BLC, inputs.velocity_BLC.detach())
    return sde.log_prob(step, inputs.prev_sample_BLC, mean)
