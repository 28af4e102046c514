"""The ranges of weights that Megatron-core's distributed optimizer leaves to this rank."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megadiff.parallel.plan import Placement


@dataclass(frozen=True, kw_only=True)
class FlatRange:
    """Hold elements start … start + numel of a local (tensor-parallel) weight.

    master: 1-D float32, what the optimizer updates. weight: the same elements of what forward uses,
    in engine.dtype; the two share memory when that is float32.
    An unused weight's range is all of it, and a master of its own is on the CPU. What LoRA leaves
    frozen has no range. In a frozen component the two are one, in engine.dtype.
    """

    start: int
    master: Tensor
    weight: Tensor


def placement_of(parameter: nn.Parameter) -> Placement:
    """Return how tensor parallelism splits the weight, which it notes on the parameter."""
    return vars(parameter)["placement"]


def whole_range(parameter: nn.Parameter) -> FlatRange:
    """Return all of a local weight, not copied."""
    flat = parameter.detach().view(-1)
    return FlatRange(start=0, master=flat, weight=flat)


def flat_ranges(distributed, parameters: dict[str, nn.Parameter]) -> dict[str, FlatRange]:
    """Return name → this rank's range, in the order of the parameters.

    A parameter that lies in other ranks' ranges alone is left out.
    """
    masters: dict[nn.Parameter, Tensor] = {}
    # megatron-core keeps weights and their masters in lists of the same order
    model_groups = [*distributed.model_fp32_groups, *distributed.model_float16_groups]
    master_groups = [*distributed.shard_fp32_groups, *distributed.shard_fp32_from_float16_groups]
    for model_group, master_group in zip(model_groups, master_groups, strict=True):
        masters |= zip(model_group, master_group, strict=True)

    ranges = {}
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            # no optimizer keeps a master of what is never trained
            whole = whole_range(parameter)
            if whole.master.dtype != torch.float32:
                whole = replace(whole, master=whole.master.to("cpu", torch.float32))
            ranges[name] = whole
        elif parameter in masters:
            # a flat range ignores rows, so it may begin in the middle of one
            flat = parameter.detach().view(-1)
            start = distributed._get_model_param_range_map(parameter)["param"].start
            master = masters[parameter]
            # sum_over_tp() looks for it on what it sums.
            vars(master)["placement"] = placement_of(parameter)
            weight = flat[start : start + master.numel()]
            ranges[name] = FlatRange(start=start, master=master, weight=weight)
    return ranges
