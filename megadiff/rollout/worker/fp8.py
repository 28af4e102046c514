"""FP8 matrix products in a replica's blocks: e4m3 copies of the bfloat16 weights that pushes bring.

Weights are scaled by row (an output feature), inputs by token, both at the largest magnitude; products accumulate in
float32 (`torch._scaled_mm`, compute capability 8.9 and higher). What is pushed, fingerprinted and wrapped by LoRA is the bfloat16
weight; in place, the copy alone is kept after that. LoRA's own products stay in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from megadiff.parallel.plan import LINEAR_KINDS, ParallelPlan
from megadiff.rollout.worker.freed_weights import FreedWeights

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
CAPABILITY = (8, 9)
MULTIPLE = 16  # of both dimensions of a weight, which the kernel wants


class Fp8Linears:
    """Layers of vLLM whose products are in FP8 from here on. layers: name → a linear layer with a bfloat16 `weight`.

    in_place: the weights' memory is given back as soon as they have their copies, one after another, until make_room(), which
    must come before each change of them, as refresh() must follow it. Never are all of both there.
    Raises ValueError for a layer that FP8 products do not take.
    """

    def __init__(self, layers: Mapping[str, nn.Module], *, in_place: bool = False) -> None:
        self.in_place, self._layers = in_place, list(layers.values())
        self._weights: list[FreedWeights] = []  # of each layer
        self._copies: list[FreedWeights] = []
        for name, layer in layers.items():
            _check(name, layer.weight)
            layer.register_buffer(
                "fp8_weight", torch.empty_like(layer.weight, dtype=FP8), persistent=False
            )
            scale = torch.empty(
                1, layer.weight.shape[0], dtype=torch.float32, device=layer.weight.device
            )
            layer.register_buffer("fp8_scale", scale, persistent=False)
            layer.quant_method = _Fp8Method()
            self._weights.append(FreedWeights([layer.weight]))
            self._copies.append(FreedWeights([layer.fp8_weight, layer.fp8_scale]))
            self._copies[-1].free()  # until refresh() comes to it
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """The copies from what the weights are now. When it raises, make_room() and all weights must come again."""
        self.keeps_weights = not self.in_place
        for layer, weights, copies in zip(self._layers, self._weights, self._copies, strict=True):
            copies.take_back()
            quantized, scale = quantize_rows(layer.weight)
            layer.fp8_weight.copy_(quantized)
            layer.fp8_scale.copy_(scale.T)
            if self.in_place:
                weights.free()

    def free_copies(self) -> None:
        """Until refresh()."""
        for copies in self._copies:
            copies.free()

    def make_room(self) -> None:
        """For weights that are about to come. Raises as FreedWeights.take_back."""
        if self.in_place:
            self.free_copies()
        for weights in self._weights:
            weights.take_back()
        self.keeps_weights = True


class _Fp8Method:
    """In place of a vLLM layer's `quant_method`, which its forward and LoRA's wrapper call."""

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return fp8_linear(x, layer.fp8_weight, layer.fp8_scale, bias)


def fp8_linear(
    x: Tensor, weight_ON: Tensor, scale_1O: Tensor, bias: Tensor | None = None
) -> Tensor:
    """x: [..., N] bfloat16; weight_ON: [O, N] e4m3; scale_1O: [1, O] float32, of its rows. Returns [..., O] bfloat16."""
    quantized, scale = quantize_rows(x.reshape(-1, x.shape[-1]))
    y = torch._scaled_mm(
        quantized, weight_ON.T, scale_a=scale, scale_b=scale_1O, out_dtype=torch.bfloat16
    )
    y = y.unflatten(0, x.shape[:-1])
    return y if bias is None else y + bias


def quantize_rows(x_RN: Tensor) -> tuple[Tensor, Tensor]:
    """x_RN: [R, N]. Returns e4m3 [R, N] and float32 [R, 1]: x = quantized × scale, a row's largest magnitude at e4m3's."""
    x = x_RN.float()
    scale_R1 = x.abs().amax(-1, keepdim=True).clamp_min(1e-12) / LARGEST
    return (x / scale_R1).clamp_(-LARGEST, LARGEST).to(FP8), scale_R1


def fp8_targets(names: Iterable[str], plan: ParallelPlan) -> list[str]:
    """Of one component's weights those of the blocks' attention and MLPs, which see every token. names: diffusers'."""
    kinds = plan.kinds(names)
    return [
        name
        for name, kind in kinds.items()
        if kind in LINEAR_KINDS and name.endswith(".weight") and plan.block_of(name) is not None
    ]


def _check(name: str, weight: Tensor) -> None:
    if weight.dtype != torch.bfloat16:
        raise ValueError(
            f"FP8 products need bfloat16 weights, {name} is {weight.dtype}; set model.dtype=bfloat16"
        )
    if weight.is_cuda and torch.cuda.get_device_capability(weight.device) < CAPABILITY:
        major, minor = torch.cuda.get_device_capability(weight.device)
        raise ValueError(
            f"FP8 products need a GPU of compute capability 8.9 or more, this one has {major}.{minor}"
        )
    if any(size % MULTIPLE for size in weight.shape):
        raise ValueError(
            f"FP8 products need weights whose sizes are multiples of {MULTIPLE}, {name} is {tuple(weight.shape)}; set "
            "rollout.fp8=false"
        )
