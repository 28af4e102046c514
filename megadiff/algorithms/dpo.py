"""Diffusion-DPO: prefer the better of two samples more than the reference does. 2311.12908."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from megadiff.algorithms.row_sums import mean_square, sum_rows
from megadiff.types import LossOutput, MatchInputs


def dpo(inputs: MatchInputs, *, beta: float) -> LossOutput:
    """Sum the weighted −log sigmoid(−beta/2·(d_chosen − d_rejected)) over B.

    Rows 2i and 2i + 1 are a pair, chosen and rejected, of the same noise and sigma. Both have the
    pair's loss, so a mean over rows is one over pairs. d: the policy's matching error minus the
    reference's, a mean over latent elements.
    """

    def error(velocity_BLC: Tensor) -> Tensor:
        return mean_square(velocity_BLC - inputs.target_BLC)

    gain_B = error(inputs.velocities["reference"]) - error(inputs.velocity_BLC)
    margin_B = 0.5 * beta * (gain_B[0::2] - gain_B[1::2]).repeat_interleave(2)
    figures = {"policy/accuracy": margin_B > 0, "policy/margin": margin_B}
    return sum_rows(-F.logsigmoid(margin_B), figures, inputs.weight_B)
