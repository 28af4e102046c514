"""The memory of weights, away and back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megadiff.rollout.worker.freed_weights import FreedWeights, ParkedWeights


def test_storages_are_empty_until_they_are_taken_back() -> None:
    """Also where two tensors share one; shapes and identity stay, and the module computes with what
    is put in afterwards.
    """
    module = nn.Linear(3, 4)
    weights = [module.weight, module.bias, module.weight[:2]]
    x = torch.randn(5, 3)
    kept, expected = [weight.detach().clone() for weight in weights], module(x)
    freed = FreedWeights(weights)
    freed.free()
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
        FreedWeights([torch.from_numpy(numpy.zeros(3, dtype=numpy.float32))]).free()


def test_parked_weights_come_back_as_they_were() -> None:
    """Of several types and of any size, also where two tensors share memory; and again after the
    first time.
    """
    module = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7).bfloat16(), nn.Embedding(0, 4))
    shared = module[0].weight[1:]
    weights = [*module.parameters(), shared]
    expected = [weight.detach().clone() for weight in weights]
    parked = ParkedWeights(weights)
    assert all(torch.equal(weight, value) for weight, value in zip(weights, expected, strict=True))
    for _ in range(2):
        parked.park()
        assert {weight.untyped_storage().nbytes() for weight in weights} == {0}
        for _ in range(2):  # a second call does nothing
            parked.fetch()
        parked.wait()
        assert all(
            torch.equal(weight, value) for weight, value in zip(weights, expected, strict=True)
        )
        assert shared.untyped_storage().data_ptr() == module[0].weight.untyped_storage().data_ptr()


def test_what_cannot_be_parked_stays() -> None:
    """A file's pages, and nothing at all."""
    numpy = pytest.importorskip("numpy")
    page = torch.from_numpy(numpy.ones(3, dtype=numpy.float32))
    parked = ParkedWeights([page])
    parked.park()
    assert page.tolist() == [1, 1, 1]
    parked.fetch()
    parked.wait()
    assert page.tolist() == [1, 1, 1]
