"""Classifier-free guidance."""

from __future__ import annotations

from torch import Tensor


def true_cfg(velocity_BLC: Tensor, negative_velocity_BLC: Tensor, scale: float) -> Tensor:
    """Guide as Qwen-Image's true CFG: rescaled to the positive velocity's norm.

    out = c·‖positive‖/‖c‖ with c = negative + scale·(positive − negative), norms over the last axis
    of the packed tokens. Computed in the inputs' dtype, as the checkpoint's own pipeline does.
    At scale 1 c is the positive velocity.
    """
    combined_BLC = negative_velocity_BLC + scale * (velocity_BLC - negative_velocity_BLC)
    return combined_BLC * (
        velocity_BLC.norm(dim=-1, keepdim=True) / combined_BLC.norm(dim=-1, keepdim=True)
    )


def plain_cfg(velocity_BLC: Tensor, negative_velocity_BLC: Tensor, scale: float) -> Tensor:
    """Guide as Wan does: negative + scale·(positive − negative)."""
    return negative_velocity_BLC + scale * (velocity_BLC - negative_velocity_BLC)


def clamped_cfg(velocity_BLC: Tensor, negative_velocity_BLC: Tensor, scale: float) -> Tensor:
    """Guide as BAGEL does: plain guidance, whose norm is never above the positive velocity's.

    The norms are of a whole sample, each row its own. Source: Bagel._combine_cfg of vllm-omni with
    cfg_renorm_type="global", which takes one norm over its call, and so one image a call.
    """
    combined_BLC = plain_cfg(velocity_BLC, negative_velocity_BLC, scale)
    norm_B = velocity_BLC.flatten(1).norm(dim=1)
    ratio_B = norm_B / (combined_BLC.flatten(1).norm(dim=1) + 1e-8)
    return combined_BLC * ratio_B.clamp(max=1.0)[:, None, None]
