"""A family's transformer with its folder's weights, without an engine."""

from __future__ import annotations

import torch
from torch import nn

from megadiff.models.adapter import ModelAdapter
from megadiff.tensors.shards import Shard
from megadiff.tensors.source_folder import SourceFolder


def plain_module(adapter: ModelAdapter) -> nn.Module:
    """Return the stock module in float32 on the CPU; what the plan freezes has no gradient."""
    module = adapter.empty_transformer().to_empty(device="cpu")
    source = SourceFolder(adapter.model_folder / "transformer")
    source.check_names({name: tuple(p.shape) for name, p in module.named_parameters()})
    parameters = dict(module.named_parameters())
    frozen = adapter.plan.frozen_names(parameters)
    for name, parameter in parameters.items():
        parameter.requires_grad_(name not in frozen)
        shape = tuple(parameter.shape)
        source.read_into(name, Shard(local=parameter.data, offsets=(0,) * len(shape), shape=shape))
    assert module.dtype == torch.float32
    return module
