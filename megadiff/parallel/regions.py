"""Collectives with a gradient, where megatron-core's own are wrong for this use, and the sum of partial gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn


class _CopyToGroup(torch.autograd.Function):
    """megatron-core's own leaves a gradient that is not contiguous unreduced, without a word."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return _summed(gradient, ctx.group), None


def copy_to_group(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x itself, which the ranks of the group use in different ways: its gradients are summed over them."""
    return x if group.size() == 1 else _CopyToGroup.apply(x, group)


class _SumOverGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _summed(part, group)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return _summed(gradient, ctx.group), None


def _summed(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    part = part.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(part, group=group)
    return part


def sum_over_group(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of the ranks' parts, on each rank, where each uses it in a way of its own: gradients are summed as well."""
    return part if group.size() == 1 else _SumOverGroup.apply(part, group)


def sum_over_tp(
    parameters: Iterable[nn.Parameter], attribute: str, group: dist.ProcessGroup
) -> None:
    """Sum over the group, in place and in one all-reduce, the gradients of those parameters that are marked for it.

    attribute: where the gradient is, `grad` or megatron-core's `main_grad`; parameters without one are left out. Call it
    once a step, after the last backward.
    """
    if group.size() == 1:
        return
    marked = (
        getattr(parameter, attribute, None)
        for parameter in parameters
        if parameter.placement.sum_over_tp
    )
    gradients = [gradient for gradient in marked if gradient is not None]
    if not gradients:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    for gradient, total in zip(
        gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True
    ):
        gradient.copy_(total.view_as(gradient))
