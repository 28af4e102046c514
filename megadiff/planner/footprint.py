"""How much of a GPU one replica takes, from the model's folder: no engine is started and no weight is read."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from pathlib import Path

from accelerate import init_empty_weights
from torch import nn

from megadiff.models.registry import FAMILIES
from megadiff.tensors.manifest import folder_manifest
from megadiff.tensors.model_files import read_json
from megadiff.types import DTYPES

NOT_SERVED = "visual."  # the text encoder's vision tower, which vllm-omni's pipeline drops


@dataclass(frozen=True, kw_only=True)
class ReplicaWeights:
    """Bytes of one worker. transformers: what a push replaces. encoder: the text encoder as a checkpoint has it. others: text
    encoder without what is not served, VAE, and so on. unknown: components that could not be sized."""

    transformers: int
    encoder: int
    others: int
    unknown: tuple[str, ...]


def replica_weights(model_folder: Path, *, dtype: str, tp: int = 1) -> ReplicaWeights:
    """Of weights in dtype. tp: workers that share the transformers' weights; each has all the rest.

    Sizes come from the safetensors headers; where only a component's config.json is there, from its empty module; those of
    a component with neither are unknown.
    """
    index = read_json(model_folder / "model_index.json")
    family = next(family for family in FAMILIES if family.pipeline_class == index["_class_name"])
    optional = [name for name in family.optional if (index.get(name) or [None])[0]]
    transformers, others, encoder, unknown = 0, 0, 0, []
    for component in (*family.weighted, *optional):
        folder = model_folder / component
        if list(folder.glob("*.safetensors")):
            manifest = folder_manifest(model_folder, (component,), dtype=dtype)
            shapes = {
                name.removeprefix(f"{component}."): row["shape"] for name, row in manifest.items()
            }
        elif (folder / "config.json").is_file():
            shapes = {
                name: list(p.shape)
                for name, p in _empty(folder, *index[component]).named_parameters()
            }
        else:
            unknown.append(component)
            continue
        held = sum(math.prod(shape) for name, shape in shapes.items() if NOT_SERVED not in name)
        if component.startswith("transformer"):
            transformers += math.ceil(held / tp)
            continue
        others += held
        if component == "text_encoder":
            encoder = sum(map(math.prod, shapes.values()))
    itemsize = DTYPES[dtype].itemsize
    return ReplicaWeights(
        transformers=itemsize * transformers,
        encoder=itemsize * encoder,
        others=itemsize * others,
        unknown=tuple(unknown),
    )


def _empty(folder: Path, library: str, class_name: str) -> nn.Module:
    """The module that a component's config.json describes, on the meta device."""
    if library not in ("diffusers", "transformers"):
        raise ValueError(
            f"model_index.json names {library}.{class_name} for {folder.name}, which is no diffusers part"
        )
    kind = getattr(importlib.import_module(library), class_name)
    with init_empty_weights():
        if library == "diffusers":
            return kind.from_config(kind.load_config(folder))
        module = kind(kind.config_class.from_pretrained(folder))
    module.tie_weights()
    return module
