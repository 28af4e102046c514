"""Any change of bits, order, dtype or shape gives another fingerprint."""

import pytest
import torch

from megadiff.weights import fingerprint as module
from megadiff.weights.fingerprint import fingerprint, fingerprints


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8])
def test_one_bit(dtype):
    tensor = (torch.arange(1000) % 97).to(dtype).reshape(10, 100)
    value = fingerprint(tensor)
    assert value == fingerprint(tensor.clone()) and len(value) == 16
    for position in (0, 499, 999):
        changed = tensor.clone()
        changed.view(torch.uint8).view(-1)[position * tensor.element_size()] ^= 1
        assert fingerprint(changed) != value


def test_order_dtype_shape_and_layout():
    tensor = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    swapped = tensor.clone()
    swapped[0, 0], swapped[0, 1] = tensor[0, 1], tensor[0, 0]
    others = [swapped, tensor.reshape(6, 8), tensor.view(torch.int32), -tensor, tensor.t().contiguous()]
    assert len({fingerprint(other) for other in [tensor, *others]}) == 6
    assert fingerprint(tensor.t().contiguous().t()) == fingerprint(tensor)  # values count, not strides
    assert fingerprint(torch.tensor(0.0)) != fingerprint(torch.tensor(-0.0))


def test_chunks_do_not_matter(monkeypatch):
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    whole = fingerprint(tensor)
    several = {"whole": tensor, "none": tensor[:0], "few": tensor[:3], "scalar": tensor[5], "half": tensor.half()}
    values = fingerprints(several)
    assert values == {name: fingerprint(each) for name, each in several.items()}
    monkeypatch.setitem(module.CHUNK_ELEMENTS, "cpu", 7)
    assert fingerprint(tensor) == whole and fingerprints(several) == values


def test_golden():
    """The same digits on every machine and version: replicas and trainer may run different ones."""
    assert fingerprint(torch.arange(12, dtype=torch.float32).reshape(3, 4)) == "13fd3e4648e7ca01"


@pytest.mark.gpu
def test_gpu_gives_the_same_digits():
    tensor = torch.randn(1 << 20).bfloat16()
    assert fingerprint(tensor.cuda()) == fingerprint(tensor)
