"""Compute matrix products in FP8 in a replica's blocks, with e4m3 copies of bfloat16 weights.

Weights are scaled by row (an output feature), inputs by token, both to their largest magnitude and
by powers of two. The trainer's FP8 (engines/fp8.py) rounds to the same numbers, whether it scales
by rows or whole tensors. Products are `torch._scaled_mm`'s, with the fast sums that the trainer's
forward has too. The bfloat16 weight is pushed or mapped, and fingerprinted; in place, only the copy
stays after that.

What LoRA adds is in the copy, which is made of W + B' A, summed in float32 (B' = α/r · B). So LoRA
costs a forward nothing. A change that is small beside W is rounded with it: docs/fp8.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from megadiff.parallel.plan import FP8_CAPABILITY, FP8_MULTIPLE
from megadiff.rollout.worker.freed_weights import FreedWeights

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max


def no_lora(_: str) -> Tensor | None:
    """Add nothing to a layer's weight."""


class Fp8Linears:
    """Switch layers of vLLM to FP8 products.

    layers: name → a linear layer with a bfloat16 `weight`. Weights that are yet to be mapped have
    no memory; their copies are made by the first refresh().
    in_place: the weights' memory is given back, layer by layer, as soon as they have their copies.
    BF16 weights and FP8 copies are never all in memory at once. Before each change of the weights
    comes make_room(), after it refresh().
    Raises ValueError for a layer that FP8 products do not take.
    """

    def __init__(self, layers: Mapping[str, Any], *, in_place: bool = False) -> None:
        self.in_place = in_place
        # name, layer, its weight, its copies
        self._layers: list[tuple[str, Any, FreedWeights, FreedWeights]] = []
        for name, layer in layers.items():
            weight = layer.weight
            _check(name, weight)
            fp8_weight = torch.empty_like(weight, dtype=FP8)
            fp8_scale = weight.new_empty(1, len(weight), dtype=torch.float32)
            layer.register_buffer("fp8_weight", fp8_weight, persistent=False)
            layer.register_buffer("fp8_scale", fp8_scale, persistent=False)
            layer.quant_method = Fp8Method()
            copies = FreedWeights([fp8_weight, fp8_scale])
            copies.free()  # until refresh() comes to it
            self._layers.append((name, layer, FreedWeights([weight]), copies))

        self.keeps_weights = True
        if all(layer.weight.untyped_storage().nbytes() for _, layer, *_ in self._layers):
            self.refresh()

    @torch.no_grad()
    def refresh(self, lora_product: Callable[[str], Tensor | None] = no_lora) -> None:
        """Make the copies from what the weights are now.

        lora_product: name → what LoRA adds to the layer's weight, [O, N] float32, or None. It is
        overwritten.
        When it raises, some weights are gone: make_room() and all weights must come again.
        """
        self.keeps_weights = not self.in_place
        for name, layer, weights, copies in self._layers:
            # Layer by layer: only one has both its weight and its copy in memory.
            copies.take_back()
            weight_ON = layer.weight
            product_ON = lora_product(name)
            if product_ON is not None:
                weight_ON = product_ON.add_(weight_ON)
            quantized, scale = quantize_rows(weight_ON)
            layer.fp8_weight.copy_(quantized)
            layer.fp8_scale.copy_(scale.T)
            if self.in_place:
                weights.free()

    def free_copies(self) -> None:
        """Give the copies' memory back until refresh()."""
        for *_, copies in self._layers:
            copies.free()

    def make_room(self) -> None:
        """Allocate memory for weights that are about to come; raises as FreedWeights.take_back."""
        if self.in_place:
            self.free_copies()
        for *_, weights, _ in self._layers:
            weights.take_back()
        self.keeps_weights = True


class Fp8Method:
    """Replace a vLLM layer's `quant_method`, which its forward and LoRA's wrapper call."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return fp8_linear(x, layer.fp8_weight, layer.fp8_scale, bias)


def fp8_linear(
    x: Tensor, weight_ON: Tensor, scale_1O: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Return x @ weight.T + bias, [..., O] bfloat16.

    x: [..., N] bfloat16. weight_ON: e4m3. scale_1O: float32, of the weight's rows.
    """
    quantized, scale = quantize_rows(x.reshape(-1, x.shape[-1]))
    y = torch._scaled_mm(
        quantized,
        weight_ON.T,
        scale_a=scale,
        scale_b=scale_1O,
        out_dtype=torch.bfloat16,
        # exact sums by rows are several times slower on Hopper
        use_fast_accum=True,
    )
    y = y.unflatten(0, x.shape[:-1])
    return y if bias is None else y + bias


def quantize_rows(x_RN: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3 [R, N] and float32 scales [R, 1], with x = quantized × scale.

    A row's largest magnitude becomes more than half of e4m3's largest. As torchao computes it.
    """
    x = x_RN.float()
    # at least 1e-12, so that nothing is divided by zero for a row of zeros
    ratio_R1 = LARGEST / x.abs().amax(-1, keepdim=True).clamp_min(1e-12)
    factor_R1 = torch.exp2(torch.floor(torch.log2(ratio_R1)))
    # e4m3 has no infinity: what a rounded product has beyond the largest number would become NaN
    quantized = (x * factor_R1).clamp_(-LARGEST, LARGEST).to(FP8)
    return quantized, factor_R1.reciprocal()


def _check(name: str, weight: Tensor) -> None:
    if weight.dtype != torch.bfloat16:
        raise ValueError(
            f"FP8 products need bfloat16 weights, {name} is {weight.dtype}; set "
            "model.dtype=bfloat16"
        )

    if weight.is_cuda and torch.cuda.get_device_capability(weight.device) < FP8_CAPABILITY:
        major, minor = torch.cuda.get_device_capability(weight.device)
        raise ValueError(
            "FP8 products need a GPU of compute capability 8.9 or more, this one has "
            f"{major}.{minor}"
        )

    if any(size % FP8_MULTIPLE for size in weight.shape):
        raise ValueError(
            f"FP8 products need weights whose sizes are multiples of {FP8_MULTIPLE}, {name} is "
            f"{tuple(weight.shape)}; set rollout.fp8=false"
        )
