"""Share what losses over clean latents and drawn noise need: matching errors and trust regions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megadiff.algorithms.row_sums import mean_square, sum_rows
from megadiff.types import LossOutput, MatchInputs

TINY = 1e-10  # under the roots: their slope at 0 is infinite
POWER = 0.25  # of ghuber, as published

# algorithm.matching → −log p of (mean squared error of the velocity, sigma), [B] each
MATCHING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "uniform": lambda error_B, sigma_B: error_B,
    "t": lambda error_B, sigma_B: sigma_B * error_B,
    "t2": lambda error_B, sigma_B: sigma_B**2 * error_B,
    "huber": lambda error_B, sigma_B: sigma_B * (torch.sqrt(error_B + TINY) - TINY**0.5),
    "ghuber": lambda error_B, sigma_B: sigma_B * ((error_B + TINY) ** POWER - TINY**POWER) / POWER,
}


def sum_matches(
    inputs: MatchInputs,
    loss_B: Tensor,
    figures: dict[str, Tensor],
    *,
    kl_coef: float,
    lagging_kl_coef: float = 0.0,
) -> LossOutput:
    """Add the squared distances to the reference's and the lagging policy's velocity, and sum.

    Each counts times its coefficient. Such a distance is a KL, but for a factor of sigma.
    """
    for name, figure, coef in (
        ("reference", "policy/kl_ref", kl_coef),
        ("lagging", "policy/kl_lagging", lagging_kl_coef),
    ):
        if coef:
            distance_B = mean_square(inputs.velocity_BLC - inputs.velocities[name])
            loss_B = loss_B + coef * distance_B
            figures[figure] = distance_B
    return sum_rows(loss_B, figures, inputs.weight_B)
