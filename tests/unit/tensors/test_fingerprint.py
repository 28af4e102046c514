"""Any change of bits, order, dtype or shape gives another fingerprint."""

import pytest
import torch

from megadiff.tensors import fingerprint as module
from megadiff.tensors.fingerprint import fingerprint, fingerprints


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]
)
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
    others = [
        swapped,
        tensor.reshape(6, 8),
        tensor.view(torch.int32),
        -tensor,
        tensor.t().contiguous(),
    ]
    assert len({fingerprint(other) for other in [tensor, *others]}) == 6
    assert fingerprint(tensor.t().contiguous().t()) == fingerprint(
        tensor
    )  # values count, not strides
    assert fingerprint(torch.tensor(0.0)) != fingerprint(torch.tensor(-0.0))


def test_chunks_do_not_matter(monkeypatch):
    tensor = torch.randn(40_000, generator=torch.Generator().manual_seed(0))
    whole = fingerprint(tensor)
    several = {
        "whole": tensor,
        "none": tensor[:0],
        "few": tensor[:3],
        "odd": tensor[1:],
        "half": tensor.half(),
    }
    values = fingerprints(several)
    assert values == {name: fingerprint(each) for name, each in several.items()}
    monkeypatch.setattr(module, "ROWS_AT_ONCE", 7)
    monkeypatch.setattr(module, "IN_PLACE_BYTES", 1 << 30)
    assert fingerprint(tensor) == whole and fingerprints(several) == values


@pytest.mark.parametrize("byte", [0x80, 0x7F, 0xFF])
def test_sums_are_exact(byte):
    """Also of the largest bytes, where a CPU that adds products up in 16 bits would saturate."""
    rows = torch.full((40, module.ROW_BYTES), byte, dtype=torch.uint8)
    factors = module._factors(rows.device)
    assert torch.equal(module._row_sums(rows).long(), rows.view(torch.int8).long() @ factors.long())
    assert factors.abs().min() == 1 and factors.abs().max() == module.MAX_FACTOR


def test_rows_and_signs():
    """Differences that a plain sum of products would not see."""
    tensor = torch.randn(64, module.ROW_BYTES // 4, generator=torch.Generator().manual_seed(0))
    swapped = tensor[torch.tensor([1, 0, *range(2, 64)])]
    two_signs = tensor.clone()
    two_signs[3, 7], two_signs[5, 9] = -tensor[3, 7], -tensor[5, 9]
    assert (
        len({fingerprint(each) for each in (tensor, swapped, two_signs, -tensor, tensor.flip(0))})
        == 5
    )


def test_golden():
    """The same digits on every machine and version: replicas and trainer may run different ones."""
    assert fingerprint(torch.arange(12, dtype=torch.float32).reshape(3, 4)) == "ccf694ee96eabc73"


@pytest.mark.gpu
def test_gpu_gives_the_same_digits():
    """Of all sizes at once, around those of rows and tiles, empty, at an odd address, and laid out
    in another order.
    """
    rows = module.ROW_BYTES
    sizes = [0, 1, rows - 1, rows, rows + 1, 128 * rows, 129 * rows + 5, 1_000_003, 1 << 24]
    tensors = {str(size): torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes}
    tensors |= {"half": torch.randn(1 << 20).bfloat16(), "turned": torch.randn(300, 700).t()}
    on_gpu = {name: tensor.cuda() for name, tensor in tensors.items()}
    tensors["odd"], on_gpu["odd"] = tensors["1000003"][1:], on_gpu["1000003"][1:]
    assert fingerprints(on_gpu) == fingerprints(tensors)
