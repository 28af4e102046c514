"""Functions whose compiled variants torch keeps in two lists."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from megadiff.process.variants import with_own_variants


class Base(nn.Module):
    def forward(self, x: Tensor, *, scale: float = 2.0) -> Tensor:
        return x * scale


class Block(Base):
    def forward(self, x: Tensor, *, scale: float = 3.0) -> Tensor:
        return super().forward(x, scale=scale) + 1


def test_a_copy_computes_the_same_with_code_of_its_own():
    block = Block()
    copy = with_own_variants(block.forward)
    x = torch.ones(2)
    assert torch.equal(copy(x), block(x)) and torch.equal(copy(x, scale=5.0), block(x, scale=5.0))
    assert copy.__code__ is not block.forward.__code__
    assert copy.__self__ is block


def test_blocks_of_a_kind_share_the_new_code():
    blocks = [Block(), Block()]
    codes = {id(with_own_variants(block.forward).__code__) for block in blocks}
    assert len(codes) == 1


def test_a_variant_for_any_size_takes_no_calls_of_the_copy():
    torch._dynamo.reset()
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph

    def double(x: Tensor) -> Tensor:
        return x * 2

    fixed = torch.compile(with_own_variants(double), backend=backend, dynamic=False)
    any_size = torch.compile(double, backend=backend, dynamic=True)
    any_size(torch.ones(5))
    fixed(torch.ones(4))
    assert len(compiled) == 2
    any_size(torch.ones(4))
    assert len(compiled) == 2
    torch._dynamo.reset()


def test_what_has_no_code_of_its_own_is_refused():
    with pytest.raises(ValueError, match="is no Python function"):
        with_own_variants(partial(print, 1))
