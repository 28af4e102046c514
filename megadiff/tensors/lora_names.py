"""LoRA tensors: their names and shapes, what is multiplied with, and which box a worker has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeGuard

import torch
from torch import Tensor

from megadiff.parallel import plan
from megadiff.parallel.lora import scaled
from megadiff.parallel.plan import is_lora, module_of
from megadiff.tensors.manifest import Manifest
from megadiff.types import LoraSpec

# scale · B is computed in float32
LARGEST_ALPHA = torch.finfo(torch.float32).max
LORA_A = f".{plan.LORA_A}"
LORA_B = f".{plan.LORA_B}"
Box = tuple[tuple[int, int], ...]  # of a tensor's dimensions: [begin, end) each


def lora_manifest(lora: LoraSpec, base: Manifest) -> Manifest:
    """Return the LoRA tensors over the modules of `base`, in the base weight's dtype.

    base: `<component>.<module>.weight` rows. Every component that has the module gets A [rank, in]
    and B [out, rank]. Raises ValueError for a module that is no matrix.
    """
    manifest: Manifest = {}
    components = sorted({name.partition(".")[0] for name in base})
    for module in lora.modules:
        names = [f"{component}.{module}" for component in components]
        matrices = {
            name: base[f"{name}.weight"]
            for name in names
            if f"{name}.weight" in base and len(base[f"{name}.weight"]["shape"]) == 2
        }

        if not matrices:
            raise ValueError(
                f"lora module {module!r} is a matrix of none of the components "
                f"{', '.join(components)}"
            )

        for name, weight in matrices.items():
            rows, columns = weight["shape"]
            dtype = weight["dtype"]
            manifest[f"{name}{LORA_A}"] = {"dtype": dtype, "shape": [lora.rank, columns]}
            manifest[f"{name}{LORA_B}"] = {"dtype": dtype, "shape": [rows, lora.rank]}
    return manifest


def lora_modules(names: Iterable[str]) -> set[str]:
    """Return the modules, with their component, of the LoRA tensors among `names`."""
    return {module_of(name) for name in names if is_lora(name)}


def lora_from_json(value: object) -> LoraSpec | None:
    """Parse dataclasses.asdict's value; None for null. Raises ValueError that says why not."""
    if value is None:
        return None
    keys = {"rank", "alpha", "modules"}
    if not isinstance(value, dict) or value.keys() != keys:
        raise ValueError(
            f"lora={value!r:.200} must be null or an object of rank, alpha and modules"
        )

    rank = value["rank"]
    alpha = value["alpha"]
    modules = value["modules"]

    # type(): isinstance takes JSON's true for 1
    if type(rank) is not int or rank < 1:
        raise ValueError(f"lora.rank={rank!r} must be an integer of at least 1")
    if not is_alpha(alpha):
        raise ValueError(f"lora.alpha={alpha!r:.80} must be a positive number")
    if (
        not isinstance(modules, list)
        or not modules
        or not all(isinstance(name, str) for name in modules)
    ):
        raise ValueError(
            f"lora.modules={modules!r:.200} must be a list of at least one module name"
        )

    # both sides compare specs, so one spec must have one spelling
    if modules != sorted(set(modules)):
        raise ValueError("lora.modules must be sorted and without doubles")
    return LoraSpec(rank=rank, alpha=float(alpha), modules=tuple(modules))


def is_alpha(value: object) -> TypeGuard[float]:
    """Tell whether a JSON value is a number above 0 in float32's range.

    NaN and infinity pass for JSON, and MKL's product with NaN need not even be NaN.
    """
    # JSON's true would pass for 1
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return 0 < value <= LARGEST_ALPHA


def worker_box(name: str, base_boxes: Mapping[str, Box], *, lora_rank: int = 0) -> Box | None:
    """Return a worker's box of a base or LoRA tensor; None for all of it.

    base_boxes: the worker's, of base weights. A LoRA's A is cut along the inputs that the worker
    has of the base weight, its B along the outputs.
    """
    if not is_lora(name):
        return base_boxes.get(name)
    box = base_boxes.get(f"{module_of(name)}.weight")
    if box is None:
        return None
    rank = (0, lora_rank)
    return (rank, box[1]) if name.endswith(LORA_A) else (box[0], rank)


def used_tensor(name: str, tensor: Tensor, spec: LoraSpec) -> Tensor:
    """Return what a replica's forward pass multiplies with: A itself, and alpha / rank · B.

    The product is rounded once, from float32 to B's dtype. It has the same bits on CPU and GPU, so
    that a replica that scales otherwise shows in its fingerprints.
    """
    return scaled(tensor, spec) if name.endswith(LORA_B) else tensor
