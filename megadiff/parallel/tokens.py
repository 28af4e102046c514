"""Run a stock diffusers transformer on this rank's tokens and heads.

Its attention processors are replaced and its tokens split. It is called as before, with whole
inputs and outputs on every rank. Gradients are this rank's tokens' part.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from megadiff.parallel import megatron_cpu
from megadiff.parallel.attention import TokenAttention, TokenAxes
from megadiff.parallel.mesh import Mesh, check_heads
from megadiff.parallel.plan import ParallelPlan
from megadiff.parallel.regions import group_of


def split_tokens(
    module: nn.Module,
    plan: ParallelPlan,
    axes: TokenAxes,
    attention: Callable[[TokenAxes], TokenAttention],
) -> None:
    """Split the module's tokens and heads, in place.

    attention: the model's processor. Raises ValueError for heads that tp and sp do not divide, and
    for a class whose forward somebody has replaced: it splits tokens itself or not at all.
    """
    origin = type(module).forward.__module__
    if origin.partition(".")[0] != type(module).__module__.partition(".")[0]:
        raise ValueError(
            f"{type(module).__name__}.forward is no longer its own but {origin}'s; VeOmni "
            "replaces it for the whole process when it builds its own class of the model: use "
            "another process"
        )

    processor = attention(axes)
    for name, site in module.named_modules():
        if plan.is_attention(name):
            check_heads(site.heads, sp=axes.sp, tp=axes.tp)
            site.set_processor(processor)

    if plan.block_tokens:
        for name, block in module.named_modules():
            if plan.is_block(name):
                _split_arguments(block, plan.block_tokens, axes)
    if plan.stream_entry:
        _split_stream(module, plan, axes)
    stock: Callable[..., tuple[Tensor]] = module.forward

    def forward(**kwargs: Any) -> tuple[Tensor]:
        """Run the stock forward, with return_dict=False, and return the whole output."""
        kwargs = processor.prepare(module, kwargs)
        # the gathered stream is padded; its own length tells where to cut
        length = kwargs[plan.token_inputs[0]].shape[1] if not plan.stream_exit else 0
        for name in plan.token_inputs:
            # an argument that is [B] is the same for all tokens
            if kwargs[name].ndim > 1:
                kwargs[name] = axes.split(kwargs[name])
        (output,) = stock(**kwargs)
        return (output if plan.stream_exit else axes.gather(output, length),)

    module.forward = forward


def ulysses_axes(mesh: Mesh) -> TokenAxes:
    """Return the axes of an engine without tensor parallelism. Collective over the world."""
    megatron_cpu.apply(mesh.device)
    timeout = timedelta(seconds=mesh.timeout_s)
    # groups of one rank stand for tp
    alone, _ = dist.new_subgroups(1, timeout=timeout)
    sp_group, _ = dist.new_subgroups(mesh.sp, timeout=timeout)
    sp_peers = group_of(sp_group)
    return TokenAxes(
        tp_group=group_of(alone),
        sp_group=sp_peers,
        token_group=sp_peers,
        sequence_parallel=False,
    )


def _split_arguments(block: nn.Module, names: Collection[str], axes: TokenAxes) -> None:
    """Give a block its own tokens' part of the arguments of these names."""
    parameters = list(inspect.signature(block.forward).parameters)
    positions = {name: parameters.index(name) for name in names}

    def enter(
        block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # a stock forward gives them by keyword, and by position where it recomputes the block
        values = list(args)
        for name, position in positions.items():
            if position < len(values):
                values[position] = _chunk(values[position])
            else:
                kwargs = kwargs | {name: _chunk(kwargs.get(name))}
        return tuple(values), kwargs

    def _chunk(value_BS: Tensor | None) -> Tensor | None:
        return None if value_BS is None else axes.split(value_BS)

    block.register_forward_pre_hook(enter, with_kwargs=True)


def _split_stream(module: nn.Module, plan: ParallelPlan, axes: TokenAxes) -> None:
    """Give a rank its own tokens between the plan's two modules."""
    # Kept from one hook to the other within a forward. A block that is recomputed in backward
    # sets it again, and nothing reads it then.
    length = 0

    def enter(
        block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        nonlocal length
        stream_BSC = args[0] if args else kwargs["hidden_states"]
        length = stream_BSC.shape[1]
        chunk_BSC = axes.split(stream_BSC)
        if args:
            return (chunk_BSC, *args[1:]), kwargs
        return args, kwargs | {"hidden_states": chunk_BSC}

    def leave(block: nn.Module, args: tuple[Any, ...], chunk_BSC: Tensor) -> Tensor:
        return axes.gather(chunk_BSC, length)

    module.get_submodule(plan.stream_entry).register_forward_pre_hook(enter, with_kwargs=True)
    module.get_submodule(plan.stream_exit).register_forward_hook(leave)
