"""Stochastic steps: one implementation, a pluggable noise scale s(sigma).

Conventions: x_sigma = (1−sigma)·x0 + sigma·noise, velocity = noise − x0. A step goes
sigma → sigma_next with dt = sigma_next − sigma < 0. The noise scale s is *without* sqrt(−dt)
everywhere. All arithmetic is float32 or, of float64 tensors, float64: in bfloat16 it is wrong.
log_prob is the mean over all non-batch elements, so ratios sit at 1 ± 1e-5. The mean is taken and
kept in float64, because float32's rounding near 1 (6e-8) is already half a percent of a clip range
of 1e-5.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megadiff.types import Sampling


@dataclass(frozen=True)
class SdeStep:
    """Say from where to where the rows of a batch step, and by which noise.

    sampling: its sde_type is a key of NOISE_SCALES, its eta says how much noise.
    schedule: [T+1] float32. sigma_B, sigma_next_B: float32, 1 >= sigma > sigma_next >= 0.
    """

    sampling: Sampling
    schedule: Tensor
    sigma_B: Tensor
    sigma_next_B: Tensor


def flow_sde_scale(step: SdeStep) -> Tensor:
    """Return eta·sqrt(sigma / (1 − sigma)), with the schedule's second sigma in place of 1.

    Flow-GRPO, arXiv 2505.05470.
    """
    # At sigma 1 the formula divides by 0.
    second = step.schedule[1].to(step.sigma_B)
    bounded_B = torch.where(step.sigma_B >= 1, second, step.sigma_B)
    return step.sampling.eta * torch.sqrt(step.sigma_B / (1 - bounded_B))


def dance_sde_scale(step: SdeStep) -> Tensor:
    """Return eta at every step. DanceGRPO, arXiv 2505.07818."""
    return torch.full_like(step.sigma_B, step.sampling.eta)


def flow_cps_scale(step: SdeStep) -> Tensor:
    """Return sigma_next·sin(eta·pi/2), which preserves coefficients. Flow-CPS, arXiv 2509.05952."""
    return step.sigma_next_B * math.sin(step.sampling.eta * math.pi / 2)


def ode_scale(step: SdeStep) -> Tensor:
    """Return 0: no noise, and no log_prob."""
    return torch.zeros_like(step.sigma_B)


NOISE_SCALES: dict[str, Callable[[SdeStep], Tensor]] = {
    "flow_sde": flow_sde_scale,
    "dance_sde": dance_sde_scale,
    "flow_cps": flow_cps_scale,
    "ode": ode_scale,
}
ODE_SOLVERS = ("euler", "dpm2")


def noise_scale(step: SdeStep) -> Tensor:
    """Return s(sigma), [B] float32."""
    return NOISE_SCALES[step.sampling.sde_type](step)


def injected_std(step: SdeStep) -> Tensor:
    """Return the std of prev_sample around its mean, [B]: s·sqrt(−dt), plain s for flow_cps."""
    scale_B = noise_scale(step)
    # Flow-CPS defines its noise a step, not per square root of time.
    if step.sampling.sde_type == "flow_cps":
        return scale_B
    return scale_B * torch.sqrt(step.sigma_B - step.sigma_next_B)


def step_mean(step: SdeStep, latents_BLC: Tensor, velocity_BLC: Tensor) -> Tensor:
    """Return the mean of p(prev_sample | latents), float32, differentiable in velocity."""
    if step.sampling.sde_type == "ode":
        return ode_step(latents_BLC, velocity_BLC, step.sigma_B, step.sigma_next_B)
    latents_BLC = _wide(latents_BLC)
    velocity_BLC = _wide(velocity_BLC)
    sigma = _spread(step.sigma_B, latents_BLC)
    sigma_next = _spread(step.sigma_next_B, latents_BLC)
    scale = _spread(noise_scale(step), latents_BLC)

    if step.sampling.sde_type == "flow_cps":
        clean_BLC = latents_BLC - sigma * velocity_BLC
        noise_BLC = latents_BLC + (1 - sigma) * velocity_BLC
        # What the noise scale adds anew is taken from the old noise: the total stays sigma_next.
        return (1 - sigma_next) * clean_BLC + torch.sqrt(sigma_next**2 - scale**2) * noise_BLC

    # The drift makes up for the noise: every s(sigma) has the marginals of the ODE.
    dt = sigma_next - sigma
    drift = scale**2 / (2 * sigma)
    return latents_BLC * (1 + drift * dt) + velocity_BLC * (1 + drift * (1 - sigma)) * dt


def log_prob(step: SdeStep, prev_sample_BLC: Tensor, mean_BLC: Tensor) -> Tensor:
    """Return log_prob [B] float64, the mean over all elements of one sample.

    The Gaussian's log density. For flow_cps −(prev_sample − mean)², without variance and
    normaliser, as its authors do.
    """
    # Squared in float32, averaged in float64: see the top of this file.
    error_B = _mean(((_wide(prev_sample_BLC) - _wide(mean_BLC)) ** 2).double())
    if step.sampling.sde_type == "flow_cps":
        return -error_B
    std_B = injected_std(step).double()
    return -error_B / (2 * std_B**2) - torch.log(std_B) - 0.5 * math.log(2 * math.pi)


def velocity_weight(step: SdeStep) -> Tensor:
    """Return how much an error of a velocity counts in log_prob, [B], relative to other steps.

    A mean that is off by e moves the log density of what the policy drew by mean(noise · e) / std.
    That of flow_cps, which has no variance, it moves by 2 · std · mean(noise · e).
    """
    zero_B11 = torch.zeros_like(step.sigma_B)[:, None, None]
    # the mean is linear in latents and velocity, without a constant
    moved_B = step_mean(step, zero_B11, zero_B11 + 1).abs().flatten()
    std_B = injected_std(step)
    return 2 * std_B * moved_B if step.sampling.sde_type == "flow_cps" else moved_B / std_B


def sde_step(
    step: SdeStep,
    latents_BLC: Tensor,
    velocity_BLC: Tensor,
    noise_BLC: Tensor,
    *,
    storage_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Take one stochastic step → (prev_sample_BLC in storage_dtype, log_prob_B)."""
    mean_BLC = step_mean(step, latents_BLC, velocity_BLC)
    std = _spread(injected_std(step), mean_BLC)
    # Rounded *before* log_prob is taken: the trainer sees only the stored sample, and must compute
    # the same number.
    prev_sample_BLC = (mean_BLC + std * noise_BLC.float()).to(storage_dtype)
    return prev_sample_BLC, log_prob(step, prev_sample_BLC, mean_BLC)


def ode_step(
    latents_BLC: Tensor, velocity_BLC: Tensor, sigma: Tensor, sigma_next: Tensor
) -> Tensor:
    """Take a deterministic Euler step in float32; sigma and sigma_next are scalars or [B]."""
    latents_BLC = _wide(latents_BLC)
    return latents_BLC + _wide(velocity_BLC) * _spread(sigma_next - sigma, latents_BLC)


def dpm2_gain(sigma_before: Tensor, sigma: Tensor, sigma_next: Tensor) -> Tensor:
    """Return g of a second-order step: ode_step() + g · (clean latents now − one step before).

    DPM-Solver++(2M), arXiv 2211.01095 algorithm 2, for alpha = 1 − sigma and the log SNR
    λ = log(alpha / sigma). Clean latents are latents − sigma · velocity, sigma_before is where they
    were predicted before. Scalars. 0 after sigma 1 and before sigma 0, where λ is infinite.
    """
    # float64: h is a difference of near-equal logarithms
    before, now, after = (torch.logit(1 - s.double()) for s in (sigma_before, sigma, sigma_next))
    # algorithm 2's first term alone is Euler's step; its second has 1/2r = h / (2 · last h)
    gain = (1 - sigma_next / sigma) * (after - now) / (2 * (now - before))
    return torch.where(sigma_next > 0, gain, 0.0).float()


def kl_to_reference(step: SdeStep, mean_BLC: Tensor, ref_mean_BLC: Tensor) -> Tensor:
    """Return the KL in mean space, mean((mean − ref_mean)²) / (2 s²), [B]; no dt factor.

    Flow-GRPO, arXiv 2505.05470.
    """
    return _mean((_wide(mean_BLC) - _wide(ref_mean_BLC)) ** 2) / (2 * noise_scale(step) ** 2)


def _spread(value: Tensor, like: Tensor) -> Tensor:
    """Shape a scalar or [B] tensor, at least float32, to broadcast against `like` [B, …]."""
    value = _wide(value).to(like.device)
    return value.reshape(-1, *([1] * (like.ndim - 1))) if value.ndim else value


def _wide(value: Tensor) -> Tensor:
    return value if value.dtype == torch.float64 else value.float()


def _mean(value_BLC: Tensor) -> Tensor:
    return value_BLC.mean(dim=tuple(range(1, value_BLC.ndim)))
