"""A stream is split on entry, whichever way a forward passes it; features are cast by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megadiff.engines.veomni import _cast
from megadiff.parallel.plan import ParallelPlan
from megadiff.parallel.tokens import _split_stream


class Halves:
    """Stand for TokenAxes on the second of two ranks, whose peer has the same tokens."""

    def split(self, tokens_BSC: Tensor) -> Tensor:
        return tokens_BSC.chunk(2, dim=1)[1]

    def gather(self, chunk_BSC: Tensor, length: int) -> Tensor:
        return torch.cat([chunk_BSC, chunk_BSC], dim=1)[:, :length]


class Block(nn.Module):
    def forward(self, hidden_states: Tensor, scale: float) -> Tensor:
        return hidden_states * scale


@pytest.mark.parametrize("by_keyword", [True, False])
def test_a_stream_enters_by_position_or_keyword(by_keyword: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()
            self.out = nn.Identity()

        def forward(self, stream_BSC: Tensor) -> Tensor:
            if by_keyword:
                return self.out(self.block(hidden_states=stream_BSC, scale=2.0))
            return self.out(self.block(stream_BSC, 2.0))

    model = Model()
    plan = ParallelPlan(rules={}, stream_entry="block", stream_exit="out")
    axes: Any = Halves()
    _split_stream(model, plan, axes)
    stream_BSC = torch.arange(3.0).view(1, 3, 1)
    assert model(stream_BSC).flatten().tolist() == [4.0, 4.0]


def test_features_are_cast_alone_or_in_lists() -> None:
    feature = torch.ones(2)
    assert _cast(feature, torch.bfloat16).dtype == torch.bfloat16
    assert [t.dtype for t in _cast([feature, feature], torch.float64)] == [torch.float64] * 2
