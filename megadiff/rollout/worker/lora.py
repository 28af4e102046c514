"""Bind the policy's LoRA inside a vllm-omni worker: tensors are set aside until the commit.

vllm-omni's own manager wraps the layers, and its own layers compute y = W x + B' (A x). Its code
that reads LoRAs from folders, matches their names and switches them per request is not used: it
drops names that do not match, scales the caller's tensors in place and turns everything off for a
request that brings no LoRA.

B' is `used_tensor` of what was pushed: scale · B, rounded once to the model's dtype. The trainer
computes the same product, in its forward and for the comparison of fingerprints. The layers'
buffers have exactly the LoRA's rank: no padding that could hold something, and the same matrix
products as in the trainer.

A layer that computes in FP8 has B' A in its FP8 copy (worker/fp8.py), and adds nothing itself.

Tested with vllm-omni 0.26 and 0.28.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from vllm.lora.peft_helper import PEFTHelper
from vllm_omni.diffusion.lora.manager import DiffusionLoRAManager

from megadiff.models.served_names import ServedPlace, ServedPlaces
from megadiff.parallel.plan import module_of
from megadiff.rollout.worker.fp8 import Fp8Method
from megadiff.tensors.lora_names import LORA_A, LORA_B, used_tensor
from megadiff.tensors.manifest import name_difference
from megadiff.types import LoraSpec, Tensors

WRAPPED = "base_layer"  # what a wrapped layer calls the layer that it wraps
SLOT = 0  # a layer of vLLM can hold several LoRAs; the policy's is the only one


class PolicyLora(DiffusionLoRAManager):
    """Hold a replica's one LoRA. spec: what is bound, None without LoRA.

    bind() is all or nothing: when it fails no layer is left with a LoRA.
    """

    def __init__(self, pipeline: nn.Module, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(pipeline, device, dtype)
        self.spec: LoraSpec | None = None
        self._modules: ServedPlaces = {}  # those of the spec
        self._set_aside: Tensors = {}

    def set_active_adapter(self, lora_request: Any, lora_scale: float = 1.0) -> None:
        """Do nothing, where vllm-omni would switch to the request's own LoRA or to none.

        The policy's LoRA serves all requests; the pipeline refuses those that bring another.
        """

    def set_aside(self, name: str, tensor: Tensor) -> None:
        """Keep a copy of a pushed tensor for bind(); the caller may reuse its memory afterwards."""
        self._set_aside[name] = tensor.detach().to(self.device, copy=True)

    def drop_set_aside(self) -> None:
        """Forget what an unfinished push left."""
        self._set_aside = {}

    def bind(self, spec: LoraSpec | None, *, places: ServedPlaces) -> None:
        """Put the tensors set aside in place of whatever was bound; None: no LoRA from now on.

        Under an equal spec, a component without any tensor set aside keeps what it has.
        places: of the base weights.
        Raises ValueError that names tensors which are missing, extra, or of another shape or dtype,
        and modules that vllm-omni cannot wrap.
        """
        pushed = self._set_aside
        self._set_aside = {}

        unchanged: set[str] = set()
        if spec is not None and spec == self.spec:
            unchanged = set(self.pipeline.policy_components) - set(map(_component, pushed))
        # Until all is bound: a LoRA in part of its layers must not count as one.
        self.spec = None
        self._modules = {}

        modules: ServedPlaces = {}
        try:
            self._reset_layers(except_of=unchanged)
            if spec is not None:
                modules = self._served_modules(spec, places)
                changed = {
                    name: served
                    for name, served in modules.items()
                    if _component(name) not in unchanged
                }
                self._bind(spec, pushed, changed)
        except Exception:
            self._reset_layers()
            raise

        self.spec = spec
        self._modules = modules

    def wraps(self, module: str) -> bool:
        """Tell whether a module is wrapped: its weights are then named `….base_layer.…`."""
        return module in self._lora_modules

    def used(self) -> Tensors:
        """Return LoRA name → the tensor that a bound layer multiplies with, A or scale · B.

        They are views. A tensor-parallel worker holds its own columns of a row-parallel layer's A,
        and its own rows of a column-parallel layer's B.
        """
        tensors = {}
        for name, served in self._modules.items():
            if self._is_bound(served.parameter, served.shard):
                layer = self._lora_modules[served.parameter]
                tensors[name + LORA_A] = layer.lora_a_stacked[served.shard][SLOT, 0]
                tensors[name + LORA_B] = layer.lora_b_stacked[served.shard][SLOT, 0]
        return tensors

    def product(self, module: str) -> Tensor | None:
        """Return what LoRA adds to a served module's weight, [O, N] float32; None for nothing.

        A tensor-parallel worker gets its part, as its weight is one.
        """
        layer = self._lora_modules.get(module)
        if layer is None or not any(layer._diffusion_lora_active_slices):
            return None

        # shards without LoRA hold zeros: set_lora() resets all of a layer's first
        pairs = zip(layer.lora_a_stacked, layer.lora_b_stacked, strict=True)
        return torch.cat([b[SLOT, 0].float() @ a[SLOT, 0].float() for a, b in pairs])

    def bound_modules(self, *, places: ServedPlaces) -> list[str]:
        """Return the modules that compute with a LoRA, with their component, sorted.

        It is read off the layers themselves, so a LoRA other than the policy's shows, too.
        """
        return sorted(
            module_of(name)
            for name, served in places.items()
            if name.endswith(".weight")
            and self._is_bound(module_of(served.parameter), served.shard)
        )

    def _is_bound(self, module: str, shard: int) -> bool:
        layer = self._lora_modules.get(module)
        return layer is not None and layer._diffusion_lora_active_slices[shard]

    def _bind(self, spec: LoraSpec, pushed: Mapping[str, Tensor], modules: ServedPlaces) -> None:
        """Bind the pushed tensors to the modules, which are of one or more components."""
        expected = {name + suffix for name in modules for suffix in (LORA_A, LORA_B)}
        difference = name_difference(expected, set(pushed))
        if difference:
            raise ValueError(
                f"the LoRA tensors pushed are not those of its {len(modules)} modules: {difference}"
            )
        if not modules:
            return
        self._wrap(spec, modules)

        stacks: dict[str, tuple[list[Tensor | None], list[Tensor | None]]] = {}
        for name, served in modules.items():
            self._check_shapes(name, served, spec, pushed)
            # A packed layer takes None for a shard without LoRA.
            empty: list[Tensor | None] = [None] * served.num_shards
            stack_a, stack_b = stacks.setdefault(served.parameter, (empty, empty.copy()))
            stack_a[served.shard] = pushed[name + LORA_A]
            stack_b[served.shard] = used_tensor(name + LORA_B, pushed[name + LORA_B], spec)

        for parameter, (stack_a, stack_b) in stacks.items():
            layer = self._lora_modules[parameter]
            if layer.n_slices == 1:
                layer.set_lora(SLOT, stack_a[0], stack_b[0])
            else:
                layer.set_lora(SLOT, stack_a, stack_b)

    def _check_shapes(
        self, name: str, served: ServedPlace, spec: LoraSpec, pushed: Mapping[str, Tensor]
    ) -> None:
        base = self._lora_modules[served.parameter].base_layer
        sizes = [base.output_size] if served.num_shards == 1 else base.output_sizes
        shapes = {LORA_A: (spec.rank, base.input_size), LORA_B: (sizes[served.shard], spec.rank)}
        for suffix, shape in shapes.items():
            tensor = pushed[name + suffix]
            if tuple(tensor.shape) != shape or tensor.dtype != self.dtype:
                raise ValueError(
                    f"{name}{suffix} is {tensor.dtype} {tuple(tensor.shape)}, but the replica's "
                    f"module takes {self.dtype} {shape} at rank {spec.rank}"
                )

    def _wrap(self, spec: LoraSpec, modules: ServedPlaces) -> None:
        """Wrap the modules' layers, unless they are already, with buffers of the LoRA's rank."""
        targets = sorted({served.parameter for served in modules.values()})
        layers = self._lora_modules.values()
        if any(layer.lora_a_stacked[0].shape[2] != spec.rank for layer in layers):
            # Makes the manager allocate all buffers again, smaller ones too.
            self._max_lora_rank = 0

        pattern = f"^(?:{'|'.join(map(re.escape, targets))})$"
        # alpha = rank gives vLLM a scale of 1: used_tensor() puts the LoRA's own into B
        helper = PEFTHelper(r=spec.rank, lora_alpha=spec.rank, target_modules=pattern)
        self._replace_layers_with_lora(helper)

        unwrapped = [name for name in targets if name not in self._lora_modules]
        if unwrapped:
            raise ValueError(
                f"vllm-omni cannot wrap {len(unwrapped)} modules with LoRA: "
                f"{', '.join(unwrapped[:5])}"
            )

        for name, served in modules.items():
            num_slices = self._lora_modules[served.parameter].n_slices
            if num_slices != served.num_shards:
                raise ValueError(
                    f"{name} is shard {served.shard} of {served.num_shards} of {served.parameter}, "
                    f"which vllm-omni wraps as {num_slices}; correct the model's served names"
                )

        # vLLM rounds ranks up.
        for layer in self._lora_modules.values():
            stacked_a = [a[:, :, : spec.rank].contiguous() for a in layer.lora_a_stacked]
            stacked_b = [b[..., : spec.rank].contiguous() for b in layer.lora_b_stacked]
            layer.lora_a_stacked = tuple(stacked_a)
            layer.lora_b_stacked = tuple(stacked_b)
            if isinstance(layer.base_layer.quant_method, Fp8Method):
                layer.apply = MethodType(_apply_base, layer)

    def _reset_layers(self, *, except_of: Collection[str] = ()) -> None:
        for name, layer in self._lora_modules.items():
            if _component(name) not in except_of:
                layer.reset_lora(SLOT)

    def _served_modules(self, spec: LoraSpec, places: ServedPlaces) -> ServedPlaces:
        """Return where each module lives: `<component>.<module>`, of every component that has it.

        `parameter` is a module's name here.
        Raises ValueError for modules that none of the pipeline's components has.
        """
        components = self.pipeline.policy_components
        modules: ServedPlaces = {}

        for component in components:
            for module in spec.modules:
                served = places.get(f"{component}.{module}.weight")
                if served is not None:
                    served = replace(served, parameter=module_of(served.parameter))
                    modules[f"{component}.{module}"] = served

        present = {name.partition(".")[2] for name in modules}
        wrong = [module for module in spec.modules if module not in present]
        if wrong:
            raise ValueError(
                f"{len(wrong)} LoRA modules are in none of the replica's "
                f"{' and '.join(components)}: {', '.join(wrong[:5])}"
            )
        return modules


def _apply_base(layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    return layer.base_layer.quant_method.apply(layer.base_layer, x, bias)


def _component(name: str) -> str:
    return name.partition(".")[0]
