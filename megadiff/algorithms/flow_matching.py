"""Supervised flow matching on straight paths from noise to image. arXiv 2210.02747."""

from __future__ import annotations

from megadiff.types import FlowInputs, LossOutput


def flow_matching(inputs: FlowInputs) -> LossOutput:
    """Sum the weighted mean((velocity − (noise − latents))²) over B, in float32.

    The mean is over tokens and channels.
    """
    error_B = (inputs.velocity_BLC - inputs.target_BLC).square().mean(dim=(1, 2))
    loss_sum = (error_B * inputs.weight_B).sum()
    return LossOutput(loss_sum=loss_sum, sums={"loss/flow_matching": loss_sum.detach()})
