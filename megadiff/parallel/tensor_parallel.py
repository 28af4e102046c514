"""Put tensor and sequence parallelism and Ulysses into a stock diffusers transformer, by its plan.

The module stays diffusers' own, with its names and its forward; linear layers and attention
processors are replaced. Afterwards it is called as before, with whole inputs and outputs on every
rank. The caller still must sum gradients:
- over tp those of parameters with `placement.sum_over_tp`, of which this rank has a part
  (regions.sum_over_tp);
- over dp·sp all, which are sums over this rank's tokens and samples. Sum, do not average. That is
  Megatron's data-parallel group with context parallelism.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from megadiff.parallel import megatron_cpu
from megadiff.parallel.attention import TokenAttention, TokenAxes
from megadiff.parallel.linear import (
    AcrossHeadsNorm,
    ColumnLinear,
    ModulationLinear,
    RowLinear,
    RowProduct,
    column,
    layer_config,
    row,
)
from megadiff.parallel.lora import Adapters, adapt, adapt_linears, lora_shapes
from megadiff.parallel.mesh import Mesh
from megadiff.parallel.plan import (
    FP8_MULTIPLE,
    LINEAR_KINDS,
    LORA_A,
    LORA_B,
    ParallelPlan,
    Placement,
    is_lora,
)
from megadiff.parallel.recompute import recompute_blocks
from megadiff.parallel.regions import group_of
from megadiff.parallel.tokens import split_tokens


def init_parallel_state(mesh: Mesh) -> None:
    """Make megatron-core's process groups for the mesh, sp being its context-parallel axis.

    Collective over the world. A process makes its groups once: raises ValueError for a second mesh
    of other sizes.
    """
    megatron_cpu.apply(mesh.device)
    if parallel_state.model_parallel_is_initialized():
        made = {
            "tp": parallel_state.get_tensor_model_parallel_world_size(),
            "sp": parallel_state.get_context_parallel_world_size(),
        }
        if made != {"tp": mesh.tp, "sp": mesh.sp}:
            raise ValueError(
                f"megatron-core was started with {made}, not tp={mesh.tp}, sp={mesh.sp}; "
                "use another process"
            )
        return

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=mesh.tp,
        context_parallel_size=mesh.sp,
        # megatron-core takes whole minutes
        distributed_timeout_minutes=math.ceil(mesh.timeout_s / 60),
        # the mesh has its own
        create_gloo_process_groups=False,
    )


def token_axes(mesh: Mesh, *, sequence_parallel: bool, fp8: bool = False) -> TokenAxes:
    """Return the axes of this rank, after init_parallel_state."""
    sequence_parallel = sequence_parallel and mesh.tp > 1
    sp_group = parallel_state.get_context_parallel_group()
    token_group = sp_group
    if sequence_parallel:
        token_group = parallel_state.get_tensor_and_context_parallel_group()

    return TokenAxes(
        tp_group=group_of(parallel_state.get_tensor_model_parallel_group()),
        sp_group=group_of(sp_group),
        token_group=group_of(token_group),
        sequence_parallel=sequence_parallel,
        multiple=FP8_MULTIPLE if fp8 else 1,  # chunks are padded to what FP8 products take
    )


def parallelize(
    module: nn.Module,
    plan: ParallelPlan,
    *,
    mesh: Mesh,
    attention: Callable[[TokenAxes], TokenAttention],
    dtype: torch.dtype,
    sequence_parallel: bool = True,
    activation_memory_budget: float = 1.0,
    fp8: str = "",
    adapters: Adapters | None = None,
    compile_blocks: Callable[[nn.Module], None] | None = None,
) -> nn.Module:
    """Replace the stock module's weights, on meta, by this rank's shards on the mesh's device.

    They are in dtype and uninitialised. Each parameter keeps its diffusers name and gets
    `placement` (parallel.plan.Placement); requires_grad is False where it is never trained.
    Call init_parallel_state(mesh) before.

    attention: the model's processor.
    sequence_parallel: split tokens over tp as well (nothing at tp=1).
    activation_memory_budget: fraction of the blocks that keep their activations. The others
    compute them again in backward.
    fp8: "" or "tensorwise", for the matrix products of the blocks' column and row layers; all else
    stays in dtype.
    adapters: LoRA, not with fp8; then it alone is trained.
    compile_blocks: compiles the module's blocks, in place. Without fp8 each block is then one graph
    with its collectives.

    Raises ValueError for a plan that does not fit the module, or sizes that tp and sp do not
    divide.
    """
    assert not (adapters and fp8), "LoRA on FP8 layers; config/validate.py refuses it"
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    shapes |= lora_shapes(adapters.spec if adapters else None, shapes)
    axes = token_axes(mesh, sequence_parallel=sequence_parallel, fp8=bool(fp8))
    placements = plan.placements(
        shapes,
        tp=axes.tp,
        tp_rank=axes.tp_group.rank,
        sequence_parallel=axes.sequence_parallel,
    )

    config = layer_config(axes, dtype=dtype, fp8=fp8)
    # without tp the layer stays the stock one, and LoRA is put beside it
    if adapters and axes.tp == 1:
        adapt_linears(module, adapters)
    if axes.tp > 1 or fp8:
        builders = _builders(plan, axes, config, traced=bool(compile_blocks) and not fp8)
        _replace_linears(module, plan, placements, axes, config, adapters, builders)

    trained = placements.keys() - plan.unused_names(placements) - plan.frozen_names(placements)
    if adapters:
        trained = set(filter(is_lora, placements))
    _materialise(module, placements, mesh.device, dtype, trained=trained)

    recompute_blocks(module, plan, budget=activation_memory_budget)
    split_tokens(module, plan, axes, attention)
    if compile_blocks:
        compile_blocks(module)
    # around compiled code, which cannot enter Transformer Engine's context
    if fp8:
        for name, block in module.named_modules():
            if plan.is_block(name):
                block.forward = partial(_in_fp8, block.forward, config)
    return module.train()


_Builders = Mapping[str, Callable[[str, Any], nn.Module]]


def _builders(
    plan: ParallelPlan, axes: TokenAxes, config: TransformerConfig, *, traced: bool
) -> _Builders:
    """Return what makes a layer of each kind from its name and the stock layer."""

    def make_column(name: str, linear: nn.Linear) -> nn.Module:
        in_attention = plan.in_attention(name)
        if traced:
            return ColumnLinear(linear, axes, in_attention=in_attention)
        return column(linear, config, axes, in_attention=in_attention)

    def make_row(name: str, linear: nn.Linear) -> nn.Module:
        return RowLinear(linear, axes) if traced else row(linear, config, axes)

    return {
        "column": make_column,
        "row": make_row,
        "modulation": lambda name, linear: ModulationLinear(linear, axes),
        "across_heads_norm": lambda name, norm: AcrossHeadsNorm(norm, axes),
    }


def _replace_linears(
    module: nn.Module,
    plan: ParallelPlan,
    placements: Mapping[str, Placement],
    axes: TokenAxes,
    config: TransformerConfig,
    adapters: Adapters | None,
    builders: _Builders,
) -> None:
    wrapped = set(adapters.spec.modules) if adapters else set()
    # a list, as layers are replaced on the way
    for name, linear in list(module.named_modules()):
        placement = placements.get(f"{name}.weight")
        if placement is None or placement.kind not in builders:
            continue

        if config.fp8 and placement.kind in LINEAR_KINDS:
            odd = [size for size in placement.local_shape if size % FP8_MULTIPLE]
            if odd:
                raise ValueError(
                    f"engine.fp8: {name} has {odd[0]} rows or columns on a rank, not a multiple "
                    f"of {FP8_MULTIPLE}, which FP8 matrix products need; lower parallel.tp or set "
                    "engine.fp8=none"
                )

        layer: nn.Module
        if not adapters or name not in wrapped:
            layer = builders[placement.kind](name, linear)
        else:
            # the input is gathered, and the output summed, once for both products: enter and leave
            enter = leave = None
            if placement.kind == "column":
                layer = ColumnLinear(linear, axes, in_attention=True)
                enter = None if plan.in_attention(name) else axes.enter_split
            else:
                layer = product = RowProduct(linear, axes)
                leave = product.finish
            # a column's B is split by rows as the layer is, a row's A by columns
            adapt(
                layer,
                adapters,
                in_features=placements[f"{name}.{LORA_A}"].local_shape[1],
                out_features=placements[f"{name}.{LORA_B}"].local_shape[0],
                enter=enter,
                leave=leave,
            )

        parent, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(parent), leaf, layer)


def _materialise(
    module: nn.Module,
    placements: Mapping[str, Placement],
    device: torch.device,
    dtype: torch.dtype,
    *,
    trained: Set[str],
) -> None:
    """Give memory to this rank's shards, under the names that the placements have."""
    # buffers have their values already
    for buffer in module.buffers():
        buffer.data = buffer.data.to(device)

    # a list, as parameters are replaced on the way
    for name, empty in list(module.named_parameters()):
        placement = placements[name]
        assert tuple(empty.shape) == placement.local_shape, (name, tuple(empty.shape), placement)
        parameter = nn.Parameter(
            torch.empty(empty.shape, dtype=dtype, device=device), requires_grad=name in trained
        )
        parameter.placement = placement  # type: ignore[attr-defined]  # torch knows no such name

        parent, _, leaf = name.rpartition(".")
        module.get_submodule(parent)._parameters[leaf] = parameter


def _in_fp8(
    forward: Callable[..., Any], config: TransformerConfig, *args: Any, **kwargs: Any
) -> Any:
    with get_fp8_context(config):
        return forward(*args, **kwargs)
