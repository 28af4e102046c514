"""Parameters without memory, as a replica's transformer has them until it maps a base."""

from __future__ import annotations

import torch
from torch import nn

from megadiff.models.empty_weights import empty_parameters, withheld_parameters


def test_parameters_keep_all_but_their_memory() -> None:
    module = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7))
    vars(module[0].weight)["weight_loader"] = "vLLM's"
    before = dict(module.named_parameters())
    empty_parameters([module], torch.device("cpu"))
    for name, parameter in module.named_parameters():
        assert parameter is before[name]
        assert parameter.untyped_storage().nbytes() == 0
    assert module[0].weight.shape == (7, 5)
    assert vars(module[0].weight) == {"weight_loader": "vLLM's"}
    assert dict(module.named_buffers())["1.running_var"].sum() == 7  # buffers stay


def test_withheld_parameters_are_not_moved() -> None:
    module = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7))
    names = [name for name, _ in module.named_parameters()]
    with withheld_parameters([module]):
        assert not list(module.parameters())
        module.to(torch.float64)
    assert [name for name, _ in module.named_parameters()] == names
    assert module[0].weight.dtype == torch.float32
    assert module[1].running_var.dtype == torch.float64
