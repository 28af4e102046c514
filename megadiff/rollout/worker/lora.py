"""The policy's LoRA inside a vllm-omni worker: pushed tensors, set aside until the commit, then bound to wrapped layers.

vllm-omni's own manager wraps the layers and its own layers compute y = W x + B' (A x). What reads adapters from folders,
matches their names and switches them per request is passed by: it drops names that do not match, scales the caller's
tensors in place and turns everything off for a request that brings no adapter.

B' is `used_tensor` of what was pushed: scale · B, rounded once to the model's dtype. The trainer computes the same
product, in its forward and for the comparison of fingerprints. The layers' buffers have exactly the adapter's rank: no
padding that could hold something, and the same matrix products as in the trainer.

Tested with vllm-omni 0.26 and 0.28.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from vllm.lora.peft_helper import PEFTHelper
from vllm_omni.diffusion.lora.manager import DiffusionLoRAManager

from megadiff.models.served_names import ServedPlace
from megadiff.parallel.plan import module_of
from megadiff.tensors.lora_names import LORA_A, LORA_B, used_tensor
from megadiff.tensors.manifest import name_difference
from megadiff.types import LoraSpec

WRAPPED = "base_layer"  # what a wrapped layer calls the layer that it wraps
SLOT = 0  # of the adapters that a layer of vLLM can hold; the policy's is the only one


class PolicyLora(DiffusionLoRAManager):
    """A replica's one adapter. spec: what is bound, None without LoRA.

    bind() is all or nothing: when it fails no layer is left with an adapter.
    """

    def __init__(self, pipeline: nn.Module, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(pipeline, device, dtype)
        self.spec: LoraSpec | None = None
        self._set_aside: dict[str, Tensor] = {}

    def set_active_adapter(self, lora_request: Any, lora_scale: float = 1.0) -> None:
        """Called by vllm-omni before every request, with the request's own adapter or None. The policy's adapter serves
        them all; the pipeline refuses requests that bring another."""

    def set_aside(self, name: str, tensor: Tensor) -> None:
        """Keeps a copy of a pushed tensor for bind(); the caller's memory is free for reuse afterwards."""
        self._set_aside[name] = tensor.detach().to(self.device, copy=True)

    def drop_set_aside(self) -> None:
        """Forgets what an unfinished push left."""
        self._set_aside = {}

    def bind(self, spec: LoraSpec | None, *, places: Mapping[str, ServedPlace]) -> None:
        """Puts the tensors set aside in place of whatever was bound; None: the base model alone, from now on. A component of
        which none were set aside keeps what it has, where an equal spec is bound.

        places: of the base weights. Raises ValueError that names tensors which are missing, extra, or of another shape
        or dtype, and modules that vllm-omni cannot wrap.
        """
        pushed, self._set_aside = self._set_aside, {}
        bound, self.spec = self.spec, None
        try:
            brought = {_component(name) for name in pushed}
            kept = (
                set(self.pipeline.policy_components) - brought if spec and spec == bound else set()
            )
            self._reset_layers(but_of=kept)
            if spec is not None:
                modules = self._module_places(spec, places)
                self._bind(
                    spec,
                    pushed,
                    {name: at for name, at in modules.items() if _component(name) not in kept},
                )
        except Exception:
            self._reset_layers()
            raise
        self.spec = spec

    def wraps(self, module: str) -> bool:
        """Whether a module of the pipeline is wrapped, so that its own weights are found under `….base_layer.…`."""
        return module in self._lora_modules

    def used(self, *, places: Mapping[str, ServedPlace]) -> dict[str, Tensor]:
        """LoRA name → the tensor that the layers multiply with, as a view: A, and scale · B. Modules that are bound only.

        A tensor-parallel worker holds its own columns of a row-parallel layer's A, and its own rows of a
        column-parallel layer's B.
        """
        if self.spec is None:
            return {}
        tensors = {}
        for name, place in self._module_places(self.spec, places).items():
            layer = self._lora_modules.get(place.parameter)
            if layer is not None and layer._diffusion_lora_active_slices[place.shard]:
                tensors[name + LORA_A] = layer.lora_a_stacked[place.shard][SLOT, 0]
                tensors[name + LORA_B] = layer.lora_b_stacked[place.shard][SLOT, 0]
        return tensors

    def bound_modules(self, *, places: Mapping[str, ServedPlace]) -> list[str]:
        """The modules that compute with an adapter, with their component, sorted: read off the layers themselves, those of
        other adapters than the policy's included."""
        return sorted(
            module_of(name)
            for name, place in places.items()
            if name.endswith(".weight")
            and (layer := self._lora_modules.get(module_of(place.parameter))) is not None
            and layer._diffusion_lora_active_slices[place.shard]
        )

    def _bind(
        self, spec: LoraSpec, pushed: Mapping[str, Tensor], modules: Mapping[str, ServedPlace]
    ) -> None:
        difference = name_difference(
            {name + suffix for name in modules for suffix in (LORA_A, LORA_B)}, set(pushed)
        )
        if difference:
            raise ValueError(
                f"the LoRA tensors pushed are not those of its {len(modules)} modules: {difference}"
            )
        if not modules:
            return
        self._wrap(spec, modules)
        pairs: dict[str, dict[int, tuple[Tensor, Tensor]]] = defaultdict(dict)
        for name, place in modules.items():
            self._check_shapes(name, place, spec, pushed)
            b = used_tensor(name + LORA_B, pushed[name + LORA_B], spec)
            pairs[place.parameter][place.shard] = (pushed[name + LORA_A], b)
        for served, of_shard in pairs.items():
            layer = self._lora_modules[served]
            if layer.n_slices == 1:
                layer.set_lora(SLOT, *of_shard[0])
            else:
                columns = zip(
                    *(of_shard.get(shard, (None, None)) for shard in range(layer.n_slices)),
                    strict=True,
                )
                layer.set_lora(SLOT, *map(list, columns))

    def _check_shapes(
        self, name: str, place: ServedPlace, spec: LoraSpec, pushed: Mapping[str, Tensor]
    ) -> None:
        base = self._lora_modules[place.parameter].base_layer
        num_outputs = base.output_size if place.num_shards == 1 else base.output_sizes[place.shard]
        for suffix, shape in (
            (LORA_A, (spec.rank, base.input_size)),
            (LORA_B, (num_outputs, spec.rank)),
        ):
            tensor = pushed[name + suffix]
            if tuple(tensor.shape) != shape or tensor.dtype != self.dtype:
                raise ValueError(
                    f"{name}{suffix} is {tensor.dtype} {tuple(tensor.shape)}, but the replica's module takes {self.dtype} "
                    f"{shape} at rank {spec.rank}"
                )

    def _wrap(self, spec: LoraSpec, modules: Mapping[str, ServedPlace]) -> None:
        """Wraps the layers of the modules, where they are not yet, with buffers of the adapter's rank."""
        served = sorted({place.parameter for place in modules.values()})
        names = "|".join(map(re.escape, served))
        if any(
            layer.lora_a_stacked[0].shape[2] != spec.rank for layer in self._lora_modules.values()
        ):
            self._max_lora_rank = 0  # has the manager make all buffers anew, smaller ones too
        self._replace_layers_with_lora(
            PEFTHelper(r=spec.rank, lora_alpha=spec.rank, target_modules=f"^(?:{names})$")
        )
        unwrapped = [name for name in served if name not in self._lora_modules]
        if unwrapped:
            raise ValueError(
                f"vllm-omni cannot wrap {len(unwrapped)} modules with LoRA: {', '.join(unwrapped[:5])}"
            )
        for name, place in modules.items():
            num_slices = self._lora_modules[place.parameter].n_slices
            if num_slices != place.num_shards:
                raise ValueError(
                    f"{name} is shard {place.shard} of {place.num_shards} of {place.parameter}, which vllm-omni wraps as "
                    f"{num_slices}; correct the model's served names"
                )
        for layer in self._lora_modules.values():  # vLLM rounds ranks up
            layer.lora_a_stacked = tuple(
                a[:, :, : spec.rank].contiguous() for a in layer.lora_a_stacked
            )
            layer.lora_b_stacked = tuple(
                b[..., : spec.rank].contiguous() for b in layer.lora_b_stacked
            )

    def _reset_layers(self, *, but_of: Collection[str] = ()) -> None:
        for name, layer in self._lora_modules.items():
            if _component(name) not in but_of:
                layer.reset_lora(SLOT)

    def _module_places(
        self, spec: LoraSpec, places: Mapping[str, ServedPlace]
    ) -> dict[str, ServedPlace]:
        """Module name with its component, of every component that has it → where it lives; `parameter` is a module's name
        here. Raises ValueError for modules that none of the pipeline's components has."""
        components = self.pipeline.policy_components
        found: dict[str, ServedPlace] = {}
        wrong = []
        for module in spec.modules:
            names = [
                f"{component}.{module}"
                for component in components
                if f"{component}.{module}.weight" in places
            ]
            found |= {name: places[f"{name}.weight"] for name in names}
            wrong += [] if names else [module]
        if wrong:
            raise ValueError(
                f"{len(wrong)} LoRA modules are in none of the replica's {' and '.join(components)}: {', '.join(wrong[:5])}"
            )
        return {
            name: ServedPlace(
                parameter=module_of(place.parameter), shard=place.shard, num_shards=place.num_shards
            )
            for name, place in found.items()
        }


def _component(name: str) -> str:
    return name.partition(".")[0]


def plain_name(parameter: str) -> str:
    """A parameter's name before its layer was wrapped."""
    return parameter.replace(f".{WRAPPED}.", ".")
