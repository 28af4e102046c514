"""Run collectives with a gradient where megatron-core's are wrong, and sum partial gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor


class _CopyToGroup(torch.autograd.Function):
    # megatron-core's own leaves a gradient that is not contiguous unreduced, without a word

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return _summed(gradient, ctx.group), None


def copy_to_group(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return x for the ranks to use in different ways; backward sums its gradients over them."""
    return x if group.size() == 1 else _CopyToGroup.apply(x, group)


class _SumOverGroup(_CopyToGroup):  # whose backward is the same
    @staticmethod
    def forward(ctx, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _summed(part, group)


def _summed(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    # all_reduce works in place, and autograd may still need what it was given
    part = part.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(part, group=group)
    return part


def sum_over_group(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum the ranks' parts; each rank uses the sum in its own way, so gradients are summed too."""
    return part if group.size() == 1 else _SumOverGroup.apply(part, group)


def sum_over_tp(parameters: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Sum in place, in one all-reduce, the gradients of parameters whose placement asks for it.

    Parameters without a gradient are left out. Call it once a step, after the last backward.
    """
    if group.size() == 1:
        return

    gradients = []
    for parameter in parameters:
        placement = parameter.placement  # type: ignore[attr-defined]  # parallelize() sets it
        if parameter.grad is not None and placement.sum_over_tp:
            gradients.append(parameter.grad)
    if not gradients:
        return

    # one collective: a model has hundreds of such parameters, most of them small
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    sums = flat.split([gradient.numel() for gradient in gradients])
    for gradient, total in zip(gradients, sums, strict=True):
        gradient.copy_(total.view_as(gradient))
