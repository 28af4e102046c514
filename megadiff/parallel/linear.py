"""Make linear layers split over tensor-parallel ranks, called like nn.Linear.

They are megatron-core's, Transformer Engine's for FP8, or for torch.compile our own. They are built
on the meta device with this rank's shapes and without weights; parallel.tensor_parallel gives them
memory.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from copy import copy
from functools import cache
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional

from megadiff.parallel.attention import TokenAxes
from megadiff.parallel.regions import (
    copy_to_group,
    gather_for_all,
    gather_for_parts,
    sum_over_group,
)


def check_transformer_engine(fp8: str) -> None:
    """Raise ValueError when Transformer Engine is not installed."""
    if importlib.util.find_spec("transformer_engine") is None:
        raise ValueError(
            f"engine.fp8={fp8} needs Transformer Engine, which is not installed; "
            "run launch/setup.sh gpu --te (NVIDIA GPUs only), or set engine.fp8=none"
        )


def layer_config(axes: TokenAxes, *, dtype: torch.dtype, fp8: str) -> TransformerConfig:
    """Return megatron-core's settings for the layers here."""
    fp8_settings: dict[str, Any] = {}
    if fp8:
        # as torchao's: e4m3 in forward, e5m2 for gradients, scaled by a tensor's present maximum
        fp8_settings = {"fp8": "hybrid", "fp8_recipe": fp8}

    return TransformerConfig(
        # these three describe a whole language model: they must be there, and are not read
        num_layers=1,
        hidden_size=axes.tp,
        num_attention_heads=axes.tp,
        tensor_model_parallel_size=axes.tp,
        sequence_parallel=axes.sequence_parallel,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        # megatron-core then leaves the device to torch's default one, meta
        use_cpu_initialization=not fp8,
        init_model_with_meta_device=bool(fp8),  # the same for Transformer Engine
        # else FP8 weights would be those from before the optimizer's step
        disable_parameter_transpose_cache=True,
        **fp8_settings,
    )


def column(
    linear: nn.Linear, config: TransformerConfig, axes: TokenAxes, *, in_attention: bool
) -> nn.Module:
    """Return a layer […, in] → […, out / tp].

    With sequence parallelism dimension 0 is gathered over tp before; backward sums over tp.
    in_attention: the caller has gathered, for several layers at once.
    """
    arguments = _arguments(linear)
    # else the layer would gather once more
    if in_attention:
        config = copy(config)
        config.sequence_parallel = False

    if not config.fp8:
        with torch.device("meta"):
            return _first_output(ColumnParallelLinear)(
                **arguments,
                config=config,
                gather_output=False,
                disable_grad_reduce=in_attention and axes.tp > 1,
            )

    from megatron.core.extensions import transformer_engine as te

    if in_attention:  # to Transformer Engine a layer of its own
        arguments["output_size"] //= axes.tp
        return _first_output(te.TELinear)(
            **arguments,
            config=config,
            parallel_mode="duplicated",
            skip_weight_param_allocation=False,
        )

    return _first_output(te.TEColumnParallelLinear)(
        **arguments,
        config=config,
        gather_output=False,
        is_expert=False,
        tp_group=axes.tp_group.process_group,
    )


def row(linear: nn.Linear, config: TransformerConfig, axes: TokenAxes) -> nn.Module:
    """Return a layer […, in / tp] → […, out], summed over tp.

    With sequence parallelism dimension 0 is then split over tp.
    """
    arguments = {**_arguments(linear), "config": config, "input_is_parallel": True}
    if not config.fp8:
        with torch.device("meta"):
            return _first_output(RowParallelLinear)(**arguments)

    from megatron.core.extensions import transformer_engine as te

    return _first_output(te.TERowParallelLinear)(
        **arguments, is_expert=False, tp_group=axes.tp_group.process_group
    )


class ColumnLinear(nn.Module):
    """Compute a column layer […, in] → […, out / tp] in one graph with what is around it.

    megatron-core's own overlaps its collectives by hand, which torch.compile cannot trace.
    in_attention: the caller has gathered, for several layers at once.
    """

    def __init__(self, linear: nn.Linear, axes: TokenAxes, *, in_attention: bool) -> None:
        super().__init__()
        self.axes = axes
        self.in_attention = in_attention
        num_rows = linear.out_features // axes.tp
        self.weight = nn.Parameter(torch.empty(num_rows, linear.in_features, device="meta"))
        self.bias = None
        if linear.bias is not None:
            self.bias = nn.Parameter(torch.empty(num_rows, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        whole = x if self.in_attention else self.axes.enter_split(x)
        return functional.linear(whole, self.weight, self.bias)


class RowProduct(nn.Module):
    """Compute a row layer's part […, in / tp] → […, out] of a sum over tp.

    The caller sums: see finish().
    """

    def __init__(self, linear: nn.Linear, axes: TokenAxes) -> None:
        super().__init__()
        self.axes = axes
        self.weight = nn.Parameter(
            torch.empty(linear.out_features, linear.in_features // axes.tp, device="meta")
        )
        # whole on every rank, as finish() adds it once, after the sum
        self.bias = None
        if linear.bias is not None:
            self.bias = nn.Parameter(torch.empty(linear.out_features, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)

    def finish(self, part: Tensor) -> Tensor:
        """Sum the ranks' parts over tp and add the bias.

        With sequence parallelism dimension 0 is then split over tp.
        """
        whole = self.axes.leave_split(part)
        return whole if self.bias is None else whole + self.bias


class RowLinear(RowProduct):
    """Compute a row layer, summed over tp, in one graph with what is around it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.finish(super().forward(x))


class ModulationLinear(nn.Module):
    """Multiply the time embedding [B, in], which every rank has, by a weight of split rows.

    Its output is whole on every rank.
    """

    def __init__(self, linear: nn.Linear, axes: TokenAxes) -> None:
        super().__init__()
        self.axes = axes
        num_rows = linear.out_features // axes.tp
        self.weight = nn.Parameter(torch.empty(num_rows, linear.in_features, device="meta"))
        self.bias = nn.Parameter(torch.empty(num_rows, device="meta"))

    def forward(self, embedding_BC: Tensor) -> Tensor:
        group = self.axes.tp_group
        # a rank's gradient is its own tokens' part, so the gather's backward sums over tp
        gather = gather_for_parts
        if not self.axes.sequence_parallel:
            # all ranks have the same gradient and take their rows of it; the input's is then summed
            gather = gather_for_all
            embedding_BC = copy_to_group(embedding_BC, group)
        part_BC = functional.linear(embedding_BC, self.weight, self.bias)
        return torch.cat(gather(part_BC, group).chunk(group.size), dim=-1)


class AcrossHeadsNorm(nn.Module):
    """Normalise as nn.RMSNorm does over all heads [..., C]; a rank has its heads' [..., C / tp]."""

    def __init__(self, norm: nn.RMSNorm, axes: TokenAxes) -> None:
        super().__init__()
        (self.num_features,) = norm.normalized_shape
        assert norm.eps is not None  # diffusers always sets it
        self.eps = norm.eps
        self.axes = axes
        self.weight = nn.Parameter(torch.empty(self.num_features // axes.tp, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        """Compute in float32, or float64, and round once, as torch's own does."""
        exact = x if x.dtype == torch.float64 else x.float()
        square_sum = sum_over_group(exact.square().sum(dim=-1, keepdim=True), self.axes.tp_group)
        normed = exact * torch.rsqrt(square_sum / self.num_features + self.eps)
        return (normed * self.weight).type_as(x)


def _arguments(linear: nn.Linear) -> dict[str, Any]:
    return {
        "input_size": linear.in_features,
        "output_size": linear.out_features,
        "bias": linear.bias is not None,
        "skip_bias_add": False,
        "init_method": lambda weight: weight,  # values come from elsewhere
    }


@cache
def _first_output(layer: type[nn.Module]) -> Callable[..., nn.Module]:
    """Return a layer of Megatron's or Transformer Engine's without the bias beside its output."""
    forward = layer.forward
    return type(layer.__name__, (layer,), {"forward": lambda self, x: forward(self, x)[0]})
