"""The memory of weights, away and back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megadiff.rollout.freed_weights import FreedWeights


def test_storages_are_empty_until_they_are_taken_back() -> None:
    """Also where two tensors share one; shapes and identity stay, and the module computes with what is put in afterwards."""
    module = nn.Linear(3, 4)
    weights = [module.weight, module.bias, module.weight[:2]]
    x = torch.randn(5, 3)
    kept, expected = [weight.detach().clone() for weight in weights], module(x)
    freed = FreedWeights(weights)
    assert [weight.untyped_storage().nbytes() for weight in weights] == [0, 0, 0]
    assert module.weight is weights[0] and module.weight.shape == (4, 3)
    for _ in range(2):  # a second call does nothing
        freed.take_back()
    for weight, value in zip(weights, kept, strict=True):
        weight.data.copy_(value)
    assert torch.equal(module(x), expected)


def test_memory_that_cannot_be_freed_is_said() -> None:
    """A view of memory that is not torch's own."""
    numpy = pytest.importorskip("numpy")
    with pytest.raises(RuntimeError, match="not resizable"):
        FreedWeights([torch.from_numpy(numpy.zeros(3, dtype=numpy.float32))])
