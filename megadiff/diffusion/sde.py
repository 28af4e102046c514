"""Stochastic steps: one implementation, a pluggable noise scale s(sigma).

Conventions: x_sigma = (1−sigma)·x0 + sigma·noise, velocity = noise − x0. A step goes
sigma → sigma_next with dt = sigma_next − sigma < 0. The noise scale s is *without* sqrt(−dt)
everywhere. All arithmetic is float32: in bfloat16 it is wrong. log_prob is the mean over all
non-batch elements, so ratios sit at 1 ± 1e-5. The mean is taken and kept in float64, because
float32's rounding near 1 (6e-8) is already half a percent of a clip range of 1e-5.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def flow_sde_scale(
    sigma_B: Tensor, *, sigma_next_B: Tensor, schedule: Tensor, eta: float
) -> Tensor:
    """Return eta·sqrt(sigma / (1 − sigma)), with the schedule's second sigma in place of 1.

    Flow-GRPO, arXiv 2505.05470.
    """
    # At sigma 1 the formula divides by 0.
    bounded_B = torch.where(sigma_B >= 1, schedule[1].to(sigma_B), sigma_B)
    return eta * torch.sqrt(sigma_B / (1 - bounded_B))


def dance_sde_scale(
    sigma_B: Tensor, *, sigma_next_B: Tensor, schedule: Tensor, eta: float
) -> Tensor:
    """Return eta at every step. DanceGRPO, arXiv 2505.07818."""
    return torch.full_like(sigma_B, eta)


def flow_cps_scale(
    sigma_B: Tensor, *, sigma_next_B: Tensor, schedule: Tensor, eta: float
) -> Tensor:
    """Return sigma_next·sin(eta·pi/2), which preserves coefficients. Flow-CPS, arXiv 2509.05952."""
    return sigma_next_B * math.sin(eta * math.pi / 2)


def ode_scale(sigma_B: Tensor, *, sigma_next_B: Tensor, schedule: Tensor, eta: float) -> Tensor:
    """Return 0: no noise, and no log_prob."""
    return torch.zeros_like(sigma_B)


NOISE_SCALES: dict[str, Callable[..., Tensor]] = {
    "flow_sde": flow_sde_scale,
    "dance_sde": dance_sde_scale,
    "flow_cps": flow_cps_scale,
    "ode": ode_scale,
}


def noise_scale(
    sde_type: str, sigma_B: Tensor, *, sigma_next_B: Tensor, schedule: Tensor, eta: float
) -> Tensor:
    """Return s(sigma), [B] float32. Raises ValueError for an unknown sde_type."""
    if sde_type not in NOISE_SCALES:
        raise ValueError(
            f"sde_type={sde_type!r} is not one of {sorted(NOISE_SCALES)}; set rollout.sde_type"
        )
    return NOISE_SCALES[sde_type](
        sigma_B.float(), sigma_next_B=sigma_next_B.float(), schedule=schedule.float(), eta=eta
    )


def injected_std(
    sde_type: str, sigma_B: Tensor, sigma_next_B: Tensor, *, schedule: Tensor, eta: float
) -> Tensor:
    """Return the std of prev_sample around its mean, [B]: s·sqrt(−dt), plain s for flow_cps."""
    scale_B = noise_scale(sde_type, sigma_B, sigma_next_B=sigma_next_B, schedule=schedule, eta=eta)
    # Flow-CPS defines its noise a step, not per square root of time.
    if sde_type == "flow_cps":
        return scale_B
    return scale_B * torch.sqrt(sigma_B.float() - sigma_next_B.float())


def step_mean(
    sde_type: str,
    latents_BLC: Tensor,
    velocity_BLC: Tensor,
    sigma_B: Tensor,
    sigma_next_B: Tensor,
    *,
    schedule: Tensor,
    eta: float,
) -> Tensor:
    """Return the mean of p(prev_sample | latents), float32, differentiable in velocity.

    1 >= sigma > sigma_next >= 0.
    """
    latents_BLC = latents_BLC.float()
    velocity_BLC = velocity_BLC.float()
    sigma = _spread(sigma_B, latents_BLC)
    sigma_next = _spread(sigma_next_B, latents_BLC)
    if sde_type == "ode":
        return latents_BLC + velocity_BLC * (sigma_next - sigma)
    scale_B = noise_scale(sde_type, sigma_B, sigma_next_B=sigma_next_B, schedule=schedule, eta=eta)
    scale = _spread(scale_B, latents_BLC)
    if sde_type == "flow_cps":
        clean_BLC = latents_BLC - sigma * velocity_BLC
        noise_BLC = latents_BLC + (1 - sigma) * velocity_BLC
        # What the noise scale adds anew is taken from the old noise: the total stays sigma_next.
        return (1 - sigma_next) * clean_BLC + torch.sqrt(sigma_next**2 - scale**2) * noise_BLC
    # The drift makes up for the noise: every s(sigma) has the marginals of the ODE.
    dt = sigma_next - sigma
    drift = scale**2 / (2 * sigma)
    return latents_BLC * (1 + drift * dt) + velocity_BLC * (1 + drift * (1 - sigma)) * dt


def log_prob(
    sde_type: str,
    prev_sample_BLC: Tensor,
    mean_BLC: Tensor,
    sigma_B: Tensor,
    sigma_next_B: Tensor,
    *,
    schedule: Tensor,
    eta: float,
) -> Tensor:
    """Return log_prob [B] float64, the mean over all elements of one sample.

    The Gaussian's log density. For flow_cps −(prev_sample − mean)², without variance and
    normaliser, as its authors do.
    """
    # Squared in float32, averaged in float64: see the top of this file.
    squared_BLC = (prev_sample_BLC.float() - mean_BLC.float()) ** 2
    if sde_type == "flow_cps":
        return -_mean(squared_BLC.double())
    std_B = injected_std(sde_type, sigma_B, sigma_next_B, schedule=schedule, eta=eta).double()
    return (
        -_mean(squared_BLC.double()) / (2 * std_B**2)
        - torch.log(std_B)
        - 0.5 * math.log(2 * math.pi)
    )


def sde_step(
    sde_type: str,
    latents_BLC: Tensor,
    velocity_BLC: Tensor,
    noise_BLC: Tensor,
    sigma_B: Tensor,
    sigma_next_B: Tensor,
    *,
    schedule: Tensor,
    eta: float,
    storage_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """Take one stochastic step → (prev_sample_BLC in storage_dtype, log_prob_B, mean_BLC).

    prev_sample is rounded to the dtype it is stored in *before* log_prob is taken, so that the
    trainer, which only sees the stored one, computes the same number.
    """
    mean_BLC = step_mean(
        sde_type, latents_BLC, velocity_BLC, sigma_B, sigma_next_B, schedule=schedule, eta=eta
    )
    std_B = injected_std(sde_type, sigma_B, sigma_next_B, schedule=schedule, eta=eta)
    prev_sample_BLC = (mean_BLC + _spread(std_B, mean_BLC) * noise_BLC.float()).to(storage_dtype)
    log_prob_B = log_prob(
        sde_type, prev_sample_BLC, mean_BLC, sigma_B, sigma_next_B, schedule=schedule, eta=eta
    )
    return prev_sample_BLC, log_prob_B, mean_BLC


def ode_step(
    latents_BLC: Tensor, velocity_BLC: Tensor, sigma: Tensor, sigma_next: Tensor
) -> Tensor:
    """Take a deterministic Euler step in float32; sigma and sigma_next are scalars or [B]."""
    latents_BLC = latents_BLC.float()
    return latents_BLC + velocity_BLC.float() * _spread(sigma_next - sigma, latents_BLC)


def kl_to_reference(
    sde_type: str,
    mean_BLC: Tensor,
    ref_mean_BLC: Tensor,
    sigma_B: Tensor,
    sigma_next_B: Tensor,
    *,
    schedule: Tensor,
    eta: float,
) -> Tensor:
    """Return the KL in mean space, mean((mean − ref_mean)²) / (2 s²), [B]; no dt factor.

    Flow-GRPO, arXiv 2505.05470.
    """
    scale_B = noise_scale(sde_type, sigma_B, sigma_next_B=sigma_next_B, schedule=schedule, eta=eta)
    return _mean((mean_BLC.float() - ref_mean_BLC.float()) ** 2) / (2 * scale_B**2)


def _spread(value: Tensor, like: Tensor) -> Tensor:
    """Shape a scalar or [B] tensor, as float32, to broadcast against `like` [B, …]."""
    value = value.float().to(like.device)
    return value.reshape(-1, *([1] * (like.ndim - 1))) if value.ndim else value


def _mean(value_BLC: Tensor) -> Tensor:
    return value_BLC.mean(dim=tuple(range(1, value_BLC.ndim)))
