"""Run collectives with a gradient that torch.compile traces, and sum partial gradients.

Each is an operator of its own to torch.compile. So it cuts no graph, and a block's activation
memory budget may run it again in backward. Neither is true of megatron-core's functions, and torch
never repeats its own functional collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_PROCESS_GROUPS: dict[str, dist.ProcessGroup] = {}  # of group_of(), by name


@dataclass(frozen=True, kw_only=True)
class Group:
    """Name the ranks of a process group, which is no argument for a traced operator."""

    name: str
    rank: int
    size: int

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Return torch's own."""
        return _PROCESS_GROUPS[self.name]


def group_of(process_group: dist.ProcessGroup) -> Group:
    """Return the group by name, for collectives of this process from now on."""
    _PROCESS_GROUPS[process_group.group_name] = process_group
    return Group(
        name=process_group.group_name, rank=process_group.rank(), size=process_group.size()
    )


def copy_to_group(x: Tensor, group: Group) -> Tensor:
    """Return x for the ranks to use in different ways; backward sums its gradients over them."""
    return _run(x, group, _same, _summed)


def sum_over_group(part: Tensor, group: Group) -> Tensor:
    """Sum the ranks' parts; each rank uses the sum in its own way, so gradients are summed too."""
    return _run(part, group, _summed, _summed)


def sum_for_all(part: Tensor, group: Group) -> Tensor:
    """Sum the ranks' parts; all ranks use the sum alike, so backward hands its gradient on."""
    return _run(part, group, _summed, _same)


def scatter_sum(part_NSC: Tensor, group: Group) -> Tensor:
    """Sum the ranks' parts [ranks · B, …] and return this rank's rows [B, …] of the sum.

    Backward gives each rank the gradient of all rows.
    """
    return _run(part_NSC, group, _summed_rows, _gathered)


def gather_for_parts(x_BSC: Tensor, group: Group) -> Tensor:
    """Return the ranks' rows [ranks · B, …]; each rank uses all, so backward sums and splits."""
    return _run(x_BSC, group, _gathered, _summed_rows)


def gather_for_all(x_BSC: Tensor, group: Group) -> Tensor:
    """Return the ranks' rows [ranks · B, …]; all ranks do the same, so backward takes its own."""
    return _run(x_BSC, group, _gathered, _own_rows)


def exchange(x_Nx: Tensor, group: Group) -> Tensor:
    """Send rank r the r-th of equal parts of dimension 0, and return those for this rank."""
    return _run(x_Nx, group, _exchanged, _exchanged)


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


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, forward: _Step, backward: _Step) -> Tensor:
        ctx.group = group
        ctx.step = backward
        return forward(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.step(gradient, ctx.group), None, None, None


_Step = Callable[[Tensor, Group], Tensor]


def _run(x: Tensor, group: Group, forward: _Step, backward: _Step) -> Tensor:
    return x if group.size == 1 else _Collective.apply(x, group, forward, backward)


def _same(x: Tensor, group: Group) -> Tensor:
    return x.view_as(x)


def _own_rows(x: Tensor, group: Group) -> Tensor:
    return x.chunk(group.size)[group.rank].contiguous()


def _summed(x: Tensor, group: Group) -> Tensor:
    return _all_reduce(x, group.name)


def _summed_rows(x: Tensor, group: Group) -> Tensor:
    return _reduce_scatter(x, group.name, group.size)


def _gathered(x: Tensor, group: Group) -> Tensor:
    return _all_gather(x, group.name, group.size)


def _exchanged(x: Tensor, group: Group) -> Tensor:
    return _all_to_all(x, group.name)


# Operators return new memory, contiguous whatever they are given, as collectives want it.
@torch.library.custom_op("megadiff::all_reduce", mutates_args=())
def _all_reduce(x: Tensor, group: str) -> Tensor:
    # it works in place, and autograd may still need what it was given
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=_PROCESS_GROUPS[group])
    return total


@torch.library.custom_op("megadiff::all_gather", mutates_args=())
def _all_gather(x: Tensor, group: str, size: int) -> Tensor:
    gathered = x.new_empty(size * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(gathered, x.contiguous(), group=_PROCESS_GROUPS[group])
    return gathered


@torch.library.custom_op("megadiff::reduce_scatter", mutates_args=())
def _reduce_scatter(x: Tensor, group: str, size: int) -> Tensor:
    summed = x.new_empty(x.shape[0] // size, *x.shape[1:])
    dist.reduce_scatter_tensor(summed, x.contiguous(), group=_PROCESS_GROUPS[group])
    return summed


@torch.library.custom_op("megadiff::all_to_all", mutates_args=())
def _all_to_all(x: Tensor, group: str) -> Tensor:
    received = x.new_empty(x.shape)
    dist.all_to_all_single(received, x.contiguous(), group=_PROCESS_GROUPS[group])
    return received


# what they return, to a tracer
_all_reduce.register_fake(lambda x, group: x.new_empty(x.shape))
_all_gather.register_fake(lambda x, group, size: x.new_empty(size * x.shape[0], *x.shape[1:]))
_reduce_scatter.register_fake(lambda x, group, size: x.new_empty(x.shape[0] // size, *x.shape[1:]))
_all_to_all.register_fake(lambda x, group: x.new_empty(x.shape))
