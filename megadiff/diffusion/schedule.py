"""Sigma schedules. sigma is the noise fraction, from 1 (pure noise) down to 0 (clean).

timestep is 1000·sigma.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megadiff.types import Sampling


def qwen_image_sigmas(
    num_steps: int, *, num_tokens: int, scheduler_config: Mapping[str, object]
) -> Tensor:
    """Return Qwen-Image's schedule, [num_steps + 1] float32 from 1 to 0, computed in float64.

    num_tokens: latent tokens of the image, (height/16)·(width/16).
    scheduler_config: the checkpoint's scheduler/scheduler_config.json. The defaults in the
    scheduler's *code* describe another schedule, so a missing key raises ValueError.
    Source: FlowMatchEulerDiscreteScheduler with dynamic exponential shifting and shift_terminal.
    """
    (terminal,) = _require(scheduler_config, "shift_terminal")

    sigmas = torch.linspace(1, 1 / num_steps, num_steps, dtype=torch.float64)
    sigmas = qwen_image_shift(sigmas, num_tokens=num_tokens, scheduler_config=scheduler_config)
    # stretch so that the last sigma before 0 is `shift_terminal`; one step alone stays at sigma 1
    if num_steps > 1:
        sigmas = 1 - (1 - sigmas) * (1 - terminal) / (1 - sigmas[-1])
    return torch.cat([sigmas, sigmas.new_zeros(1)]).float()


def qwen_image_shift(
    sigmas: Tensor, *, num_tokens: int, scheduler_config: Mapping[str, object]
) -> Tensor:
    """Shift sigmas in (0, 1] to Qwen-Image's for this image size: e^mu / (e^mu + 1/sigma − 1).

    Same shape and dtype.
    """
    base_shift, max_shift, base_len, max_len = _require(
        scheduler_config, "base_shift", "max_shift", "base_image_seq_len", "max_image_seq_len"
    )
    if not scheduler_config.get("use_dynamic_shifting"):
        raise ValueError(
            "scheduler_config.json has use_dynamic_shifting=false; Qwen-Image's schedule needs true"
        )

    # mu is linear in the number of tokens, through (base_len, base_shift), (max_len, max_shift).
    slope = (max_shift - base_shift) / (max_len - base_len)
    exp_mu = math.exp(num_tokens * slope + base_shift - base_len * slope)
    return exp_mu / (exp_mu + 1 / sigmas - 1)


def static_sigmas(num_steps: int, *, shift: float, last: float) -> Tensor:
    """Return a schedule of equal steps from 1 to `last`, shifted, and then 0.

    [num_steps + 1] float32, computed in float64.
    last: the last sigma before 0, not yet shifted. Source: FlowMatchEulerDiscreteScheduler with
    use_dynamic_shifting=false.
    """
    sigmas = torch.linspace(1, last, num_steps, dtype=torch.float64)
    return torch.cat([static_shift(sigmas, shift=shift), sigmas.new_zeros(1)]).float()


def static_shift(sigmas: Tensor, *, shift: float) -> Tensor:
    """Shift sigmas in [0, 1] to those of the schedule. Same shape and dtype."""
    return shift * sigmas / (1 + (shift - 1) * sigmas)


def check_window(sampling: Sampling) -> None:
    """Raises ValueError when no window of sde_window_size steps fits into [low, high)."""
    low, high = sampling.sde_window_range
    window_size = sampling.sde_window_size
    num_steps = sampling.num_inference_steps
    if window_size < 0 or not 0 <= low <= high:
        raise ValueError(
            f"rollout.sde_window_size={window_size} with rollout.sde_window_range=[{low}, {high}]: "
            "sizes must be >= 0 and the range must rise; "
            "set e.g. sde_window_size=2 sde_window_range=[0,5]"
        )
    if window_size > high - low:
        raise ValueError(
            f"rollout.sde_window_size={window_size} > {high - low} = width of "
            f"rollout.sde_window_range=[{low}, {high}]; "
            f"set rollout.sde_window_size<={high - low} or widen the range"
        )

    # The SDE ends in noise; the step to sigma 0 must leave none.
    if window_size and high > num_steps - 1:
        raise ValueError(
            f"rollout.sde_window_range=[{low}, {high}] reaches past step {num_steps - 1} of "
            f"rollout.num_inference_steps={num_steps}; the last step (to sigma 0) is never "
            f"stochastic; set sde_window_range=[{low},{num_steps - 1}] or lower"
        )


def _require(config: Mapping[str, Any], *keys: str) -> list[float]:
    missing = [key for key in keys if config.get(key) is None]
    if missing:
        raise ValueError(
            f"scheduler_config.json lacks {', '.join(missing)}; the schedule comes from the "
            "checkpoint's own scheduler/scheduler_config.json, never from defaults"
        )
    return [float(config[key]) for key in keys]
