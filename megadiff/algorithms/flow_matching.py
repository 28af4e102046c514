"""Supervised flow matching: the velocity of a straight path from noise to image. arXiv 2210.02747, as in math.md (SFT)."""

from __future__ import annotations

from megadiff.types import FlowInputs, LossOutput


def flow_matching(inputs: FlowInputs) -> LossOutput:
    """Weighted sum over B of mean((velocity − (noise − latents))²), the mean over tokens and channels, float32."""
    error_B = (inputs.velocity_BLC - inputs.target_BLC).square().mean(dim=(1, 2))
    loss_sum = (error_B * inputs.weight_B).sum()
    return LossOutput(loss_sum=loss_sum, sums={"loss/flow_matching": loss_sum.detach()})
