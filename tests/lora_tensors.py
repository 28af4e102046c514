"""A LoRA for tests: random tensors over the linears of a model, the weights that they merge to, a
push of them by hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from megadiff.rollout.client.client import ReplicaClient
from megadiff.sync.bucket import encode_bucket
from megadiff.tensors.fingerprint import fingerprints
from megadiff.tensors.lora_files import DIFFUSERS_PREFIX, DIFFUSERS_WEIGHTS, diffusers_metadata
from megadiff.tensors.lora_names import LORA_A, LORA_B, lora_manifest, used_tensor
from megadiff.tensors.manifest import folder_manifest
from megadiff.types import LoraSpec

Tensors = dict[str, Tensor]


def linears(base: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The linears of all blocks but for modulation, sorted.

    base: the transformer's weights, as a push names them.
    """
    modules = (
        name.removeprefix("transformer.").removesuffix(".weight")
        for name in base
        if name.endswith(".weight")
    )
    return tuple(
        sorted(
            name for name in modules if (".attn." in name or "_mlp." in name) and "norm" not in name
        )
    )


def random_lora(base: Mapping[str, Tensor], spec: LoraSpec, *, seed: int = 0) -> Tensors:
    """Of every component in base."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for component, module in _places(base, spec):
        weight = base[f"{component}.{module}.weight"]
        num_outputs, num_inputs = weight.shape
        for suffix, shape in (
            (LORA_A, (spec.rank, num_inputs)),
            (LORA_B, (num_outputs, spec.rank)),
        ):
            values = 0.2 * torch.randn(shape, generator=generator)
            tensors[f"{component}.{module}{suffix}"] = values.to(weight.dtype)
    return tensors


def merged(base: Mapping[str, Tensor], lora: Mapping[str, Tensor], spec: LoraSpec) -> Tensors:
    products = {
        f"{component}.{module}.weight": spec.scale
        * (lora[f"{component}.{module}{LORA_B}"] @ lora[f"{component}.{module}{LORA_A}"])
        for component, module in _places(base, spec)
    }
    return {name: tensor + products.get(name, 0) for name, tensor in base.items()}


def _places(base: Mapping[str, Tensor], spec: LoraSpec) -> list[tuple[str, str]]:
    """(component, module) of all low-rank pairs."""
    components = sorted({name.partition(".")[0] for name in base})
    return [(component, module) for component in components for module in spec.modules]


def expected_prints(
    base: Mapping[str, Tensor], lora: Mapping[str, Tensor], spec: LoraSpec
) -> dict[str, str]:
    """What a replica that uses them answers to the commit."""
    return fingerprints(
        {name: used_tensor(name, tensor, spec) for name, tensor in {**base, **lora}.items()}
    )


def push_lora(
    client: ReplicaClient,
    base: Mapping[str, Tensor],
    lora: Mapping[str, Tensor],
    spec: LoraSpec,
    *,
    version: int,
    model: Path,
    dtype: str = "float32",
) -> dict:
    """Base and LoRA, in two buckets; the replica's answer to the commit."""
    manifest = folder_manifest(model, ("transformer",), dtype=dtype)
    client.weights_begin(version, manifest | lora_manifest(spec, manifest), lora=spec)
    for tensors in (base, lora):
        client.weights_bucket(encode_bucket(list(tensors.items())))
    (answer,) = client.weights_commit(version)
    return answer


def write_lora(folder: Path, spec: LoraSpec, shapes: Mapping[str, tuple[int, int]]) -> Tensors:
    """Write random tensors as the export does, in diffusers' file; returns them by our names."""
    generator = torch.Generator().manual_seed(3)
    tensors = {
        name: torch.randn(shape, generator=generator) / shape[1] ** 0.5
        for name, shape in shapes.items()
    }
    folder.mkdir(exist_ok=True)
    save_file(
        {f"{DIFFUSERS_PREFIX}{name}": tensor for name, tensor in tensors.items()},
        folder / DIFFUSERS_WEIGHTS,
        metadata=diffusers_metadata(spec),
    )
    return tensors
