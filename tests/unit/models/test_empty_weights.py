"""Parameters without memory, as a replica's transformer has them until it maps a base."""

from __future__ import annotations

import torch
from torch import nn

from megadiff.models.empty_weights import empty_parameters, withheld_parameters
from megadiff.models.pipeline_base import RolloutPipelineMixin


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


class StockPipeline(nn.Module):
    """Stands for vllm-omni's, which loads the networks that its sources name."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = Transformer(3, 5)
        self.text_encoder = nn.Linear(3, 5)

    def load_weights(self, weights):
        return {name for name, _ in weights}


class Transformer(nn.Linear):
    def load_weights(self, weights):
        assert not list(weights)
        self.stacked_params_mapping = []


class Pipeline(RolloutPipelineMixin, StockPipeline):
    def __init__(self) -> None:
        StockPipeline.__init__(self)
        self.transformer.register_buffer("table", torch.ones(4))
        self.policy_components = ("transformer",)
        self.weights_sources = []
        self.maps_base = True
        self.is_empty = True
        empty_parameters(self._policy_modules(), torch.device("cpu"))


def test_a_pipeline_moves_without_its_policys_weights() -> None:
    pipeline = Pipeline()
    weight = pipeline.transformer.weight
    # as to a device: with what is there, it would read past the end of an empty storage
    assert pipeline.to(torch.float64) is pipeline
    assert pipeline.text_encoder.weight.dtype == pipeline.transformer.table.dtype == torch.float64
    assert pipeline.transformer.weight is weight and weight.shape == (5, 3)
    assert weight.untyped_storage().nbytes() == 0

    # vllm-omni wants every name
    assert pipeline.load_weights(iter(())) == dict(pipeline.named_parameters()).keys()
    assert pipeline.transformer.stacked_params_mapping == []

    weight.data = torch.ones(5, 3)
    pipeline.transformer.bias.data = torch.ones(5)
    pipeline.is_empty = False
    pipeline.to(torch.float64)
    assert weight.dtype == torch.float64 and weight.sum() == 15
