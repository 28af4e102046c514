"""FP8 products beside bfloat16 weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megadiff.rollout.worker.fp8 import Fp8Linears, fp8_linear, quantize_rows


def test_rows_are_scaled_to_their_largest_magnitude() -> None:
    x_RN = torch.tensor([[0.0, 0.0], [1.0, -3.0], [1e-3, 2e-3], [1e30, -1e30]])
    quantized, scale_R1 = quantize_rows(x_RN)
    assert torch.equal(quantized.float().abs().amax(-1), torch.tensor([0.0, 384.0, 256.0, 416.0]))
    mantissa, _ = torch.frexp(scale_R1)
    assert torch.equal(mantissa, torch.full((4, 1), 0.5)), "a power of two"
    torch.testing.assert_close(quantized.float() * scale_R1, x_RN, rtol=2**-4, atol=0)


def test_products_are_those_of_the_rounded_numbers() -> None:
    """Not of bfloat16's: they are 4 % apart.

    The outputs of tokens of very different sizes are equally good.
    """
    generator = torch.Generator().manual_seed(0)
    size = torch.logspace(-3, 3, 6).reshape(2, 3, 1)
    x = (torch.randn(2, 3, 64, generator=generator) * size).bfloat16()
    weight_ON = torch.randn(96, 64, generator=generator).bfloat16()
    bias = torch.randn(96, generator=generator).bfloat16()
    quantized, scale_O1 = quantize_rows(weight_ON)
    y = fp8_linear(x, quantized, scale_O1.T.contiguous())
    rounded, scale_R1 = quantize_rows(x.reshape(6, 64))
    expected = (rounded.float() * scale_R1) @ (quantized.float() * scale_O1).T
    torch.testing.assert_close(y.float().reshape(6, 96), expected, rtol=2**-7, atol=1e-5)
    exact = x.float() @ weight_ON.float().T
    error = (y.float() - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert 0.01 < error.min() and error.max() < 0.06
    assert torch.equal(fp8_linear(x, quantized, scale_O1.T.contiguous(), bias), y + bias)


def test_copies_follow_the_weights_when_told() -> None:
    layer = nn.Linear(32, 48, dtype=torch.bfloat16)
    linears = Fp8Linears({"a": layer})
    x = torch.randn(5, 32, dtype=torch.bfloat16)
    before = layer.quant_method.apply(layer, x, layer.bias)
    with torch.no_grad():
        layer.weight.mul_(2)
    assert torch.equal(layer.quant_method.apply(layer, x, layer.bias), before)
    linears.refresh()
    assert not torch.equal(layer.quant_method.apply(layer, x, layer.bias), before)
    assert dict(layer.named_parameters()).keys() == {"weight", "bias"} == layer.state_dict().keys()


def test_lora_is_added_in_float32() -> None:
    layer = nn.Linear(32, 48, bias=False, dtype=torch.bfloat16)
    product_ON = torch.randn(48, 32) / 4
    linears = Fp8Linears({"a": layer, "b": nn.Linear(32, 48, dtype=torch.bfloat16)})
    linears.refresh({"a": product_ON.clone(), "b": None}.__getitem__)
    exact = layer.weight.float() + product_ON
    quantized, scale_O1 = quantize_rows(exact)
    assert torch.equal(layer.fp8_weight.float(), quantized.float())
    assert torch.equal(layer.fp8_scale, scale_O1.T)
    rounded, _ = quantize_rows(exact.bfloat16())
    assert not torch.equal(rounded.float(), quantized.float())


def _sizes(layer: nn.Linear) -> list[int]:
    """Bytes of a weight, of its copy and of the copy's scales."""
    return [
        tensor.untyped_storage().nbytes()
        for tensor in (layer.weight, layer.fp8_weight, layer.fp8_scale)
    ]


def test_copies_in_place_of_weights() -> None:
    """What a sleeping replica goes through, twice; the second time without a sleep between two
    pushes.
    """
    layers = {name: nn.Linear(32, 48, dtype=torch.bfloat16) for name in "ab"}
    pushed = {name: layer.weight.detach().clone() for name, layer in layers.items()}
    x, first = torch.randn(5, 32, dtype=torch.bfloat16), layers["a"]
    expected = fp8_linear(x, *_transposed(quantize_rows(first.weight.detach())))
    whole, copied = [2 * 32 * 48, 0, 0], [0, 32 * 48, 4 * 48]
    linears = Fp8Linears(layers, in_place=True)
    for sleeps in (True, False):
        assert [_sizes(layer) for layer in layers.values()] == [
            copied,
            copied,
        ] and not linears.keeps_weights
        assert torch.equal(first.quant_method.apply(first, x), expected)
        if sleeps:
            linears.free_copies()
            assert _sizes(first) == [0, 0, 0]
        linears.make_room()
        assert [_sizes(layer) for layer in layers.values()] == [
            whole,
            whole,
        ] and linears.keeps_weights
        _fill(layers, pushed)
        linears.refresh()


def test_copies_beside_weights_are_freed_and_made_again() -> None:
    layer = nn.Linear(32, 48, dtype=torch.bfloat16)
    linears, x = Fp8Linears({"a": layer}), torch.randn(5, 32, dtype=torch.bfloat16)
    before = layer.quant_method.apply(layer, x)
    linears.free_copies()
    linears.make_room()
    assert _sizes(layer) == [2 * 32 * 48, 0, 0]
    linears.refresh()
    assert _sizes(layer) == [2 * 32 * 48, 32 * 48, 4 * 48] and linears.keeps_weights
    assert torch.equal(layer.quant_method.apply(layer, x), before)


def test_copies_of_weights_that_are_mapped_later() -> None:
    layer = nn.Linear(32, 48, dtype=torch.bfloat16)
    x, expected = torch.randn(5, 32, dtype=torch.bfloat16), layer.weight.detach().clone()
    layer.weight.data.untyped_storage().resize_(0)
    linears = Fp8Linears({"a": layer})
    assert _sizes(layer) == [0, 0, 0] and linears.keeps_weights

    layer.weight.data = expected
    for _ in range(2):
        linears.make_room()
        linears.refresh()
        assert _sizes(layer) == [2 * 32 * 48, 32 * 48, 4 * 48]
        product = fp8_linear(x, *_transposed(quantize_rows(expected)))
        assert torch.equal(layer.quant_method.apply(layer, x), product)
        linears.free_copies()
        assert layer.weight.data_ptr() == expected.data_ptr()


def test_a_refresh_that_broke_off_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by memory that was not there: the next push brings everything."""
    layers = {name: nn.Linear(32, 48, dtype=torch.bfloat16) for name in "abc"}
    pushed = {name: layer.weight.detach().clone() for name, layer in layers.items()}
    linears, x = Fp8Linears(layers, in_place=True), torch.randn(5, 32, dtype=torch.bfloat16)
    before = {name: layer.quant_method.apply(layer, x) for name, layer in layers.items()}
    outcomes = iter([True, False])

    def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not next(outcomes, True):
            raise torch.OutOfMemoryError("full")
        return quantize_rows(weight)

    monkeypatch.setattr("megadiff.rollout.worker.fp8.quantize_rows", quantize)
    linears.make_room()
    _fill(layers, pushed)
    with pytest.raises(torch.OutOfMemoryError):
        linears.refresh()
    assert not linears.keeps_weights
    linears.make_room()
    assert {tuple(_sizes(layer)) for layer in layers.values()} == {(2 * 32 * 48, 0, 0)}
    _fill(layers, pushed)
    linears.refresh()
    monkeypatch.undo()
    assert all(
        torch.equal(layer.quant_method.apply(layer, x), before[name])
        for name, layer in layers.items()
    )


def _fill(layers: dict[str, nn.Linear], pushed: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, layer in layers.items():
            layer.weight.copy_(pushed[name])


def _transposed(quantized: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    weight_ON, scale_O1 = quantized
    return weight_ON, scale_O1.T.contiguous()


def test_layers_that_it_does_not_take() -> None:
    with pytest.raises(ValueError, match=r"multiples of 16, b is \(48, 20\)"):
        Fp8Linears({"b": nn.Linear(20, 48, dtype=torch.bfloat16)})
    with pytest.raises(ValueError, match="b is torch.float32; set model.dtype=bfloat16"):
        Fp8Linears({"b": nn.Linear(32, 48)})
