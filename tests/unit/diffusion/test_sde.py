"""Steps against float64 references written from the formulas, and the invariants that training
relies on.
"""

import math

import pytest
import torch

from megadiff.diffusion import sde
from megadiff.diffusion.guidance import plain_cfg, true_cfg
from megadiff.types import Sampling

SCHEDULE = torch.tensor([1.0, 0.8, 0.5, 0.2, 0.0])
STOCHASTIC = ["flow_sde", "dance_sde", "flow_cps"]


def _tensors(seed=0, batch=3, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(batch, 6, 5, generator=generator) for _ in range(3)]


def _step(sde_type, sigma, sigma_next, eta=0.7):
    sampling = Sampling(height=32, width=32, num_inference_steps=4, sde_type=sde_type, eta=eta)
    return sde.SdeStep(sampling, SCHEDULE, sigma, sigma_next)


def _reference(sde_type, x, v, sigma, sigma_next, eta):
    """(mean, std of the injected noise) in float64, straight from the papers."""
    x, v, s, n = x.double(), v.double(), float(sigma), float(sigma_next)
    if sde_type == "flow_cps":
        scale = n * math.sin(eta * math.pi / 2)
        return (1 - n) * (x - s * v) + math.sqrt(n**2 - scale**2) * (x + (1 - s) * v), scale
    scale = eta if sde_type == "dance_sde" else eta * math.sqrt(s / (1 - (0.8 if s == 1 else s)))
    dt = n - s
    mean = x * (1 + scale**2 * dt / (2 * s)) + v * (1 + scale**2 * (1 - s) / (2 * s)) * dt
    return mean, scale * math.sqrt(-dt)


@pytest.mark.parametrize("sde_type", STOCHASTIC)
@pytest.mark.parametrize("index", [0, 1, 2])
def test_step_against_float64(sde_type, index):
    x, v, noise = _tensors()
    sigma, sigma_next = SCHEDULE[index].expand(3), SCHEDULE[index + 1].expand(3)
    step = _step(sde_type, sigma, sigma_next)
    prev, log_prob = sde.sde_step(step, x, v, noise)
    mean = sde.step_mean(step, x, v)
    ref_mean, std = _reference(sde_type, x, v, SCHEDULE[index], SCHEDULE[index + 1], 0.7)
    torch.testing.assert_close(mean.double(), ref_mean, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(prev.double(), ref_mean + std * noise.double(), atol=1e-6, rtol=1e-6)
    squared = (prev.double() - ref_mean) ** 2
    density = (
        -squared
        if sde_type == "flow_cps"
        else (-squared / (2 * std**2) - math.log(std) - 0.5 * math.log(2 * math.pi))
    )
    assert log_prob.dtype == torch.float64
    torch.testing.assert_close(log_prob, density.mean(dim=(1, 2)), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("sde_type", STOCHASTIC)
def test_log_prob_is_that_of_the_stored_sample(sde_type):
    """Rounded to bfloat16 first: recomputing from what is stored gives the same number, bit for
    bit.
    """
    x, v, noise = _tensors()
    sigma, sigma_next = SCHEDULE[1].expand(3), SCHEDULE[2].expand(3)
    step = _step(sde_type, sigma, sigma_next)
    prev, log_prob = sde.sde_step(step, x, v, noise, storage_dtype=torch.bfloat16)
    assert prev.dtype == torch.bfloat16
    assert torch.equal(sde.log_prob(step, prev, sde.step_mean(step, x, v)), log_prob)
    unrounded = sde.sde_step(step, x, v, noise)[1]
    assert not torch.equal(unrounded, log_prob)


@pytest.mark.parametrize("sde_type", STOCHASTIC)
def test_velocity_weight_is_the_gradient_of_log_prob(sde_type):
    x, v, noise = _tensors()
    step = _step(sde_type, SCHEDULE[1:4], SCHEDULE[2:5])
    v.requires_grad_()
    mean = sde.step_mean(step, x, v)
    prev = (mean + sde.injected_std(step)[:, None, None] * noise).detach()
    (gradient,) = torch.autograd.grad(sde.log_prob(step, prev, mean).sum(), v)
    # each element of the gradient is noise · weight / their number
    weights = gradient.norm(dim=(1, 2)) / noise.norm(dim=(1, 2)) * noise[0].numel()
    torch.testing.assert_close(sde.velocity_weight(step), weights)


def test_noise_of_zero_scale_is_the_ode():
    x, v, _ = _tensors()
    sigma, sigma_next = SCHEDULE[1].expand(3), SCHEDULE[2].expand(3)
    ode = sde.ode_step(x, v, sigma, sigma_next)
    for sde_type in STOCHASTIC:
        mean = sde.step_mean(_step(sde_type, sigma, sigma_next, eta=0.0), x, v)
        torch.testing.assert_close(mean, ode, atol=1e-6, rtol=1e-6)
    assert torch.equal(sde.step_mean(_step("ode", sigma, sigma_next), x, v), ode)


def test_sigma_per_sample_equals_one_by_one():
    x, v, noise = _tensors()
    sigma, sigma_next = SCHEDULE[:3], SCHEDULE[1:4]
    together = sde.sde_step(_step("flow_sde", sigma, sigma_next, eta=1.2), x, v, noise)
    for row in range(3):
        part = slice(row, row + 1)
        alone = sde.sde_step(
            _step("flow_sde", sigma[part], sigma_next[part], eta=1.2),
            x[part],
            v[part],
            noise[part],
        )
        for a, b in zip(together, alone, strict=True):
            assert torch.equal(a[part], b)


def test_half_precision_inputs_are_computed_in_float32():
    x, v, noise = (tensor.bfloat16() for tensor in _tensors())
    sigma, sigma_next = SCHEDULE[1].expand(3), SCHEDULE[2].expand(3)
    step = _step("flow_sde", sigma, sigma_next)
    ours = sde.step_mean(step, x, v)
    assert ours.dtype == torch.float32
    exact = sde.step_mean(step, x.float(), v.float())
    assert torch.equal(ours, exact)


def test_kl_to_itself_is_zero_and_has_no_dt():
    x, v, noise = _tensors()
    step = _step("dance_sde", SCHEDULE[1:4], SCHEDULE[2:5])
    assert not sde.kl_to_reference(step, x, x).any()
    value = sde.kl_to_reference(step, x, v)
    torch.testing.assert_close(value, ((x - v) ** 2).mean(dim=(1, 2)) / (2 * 0.7**2))


def test_true_cfg_keeps_the_positive_norm():
    positive, negative, _ = _tensors()
    guided = true_cfg(positive, negative, 4.0)
    torch.testing.assert_close(guided.norm(dim=-1), positive.norm(dim=-1))
    torch.testing.assert_close(true_cfg(positive, negative, 1.0), positive)
    direction = plain_cfg(positive, negative, 4.0)
    torch.testing.assert_close(
        torch.nn.functional.cosine_similarity(guided, direction, dim=-1), torch.ones(3, 6)
    )
