"""LoRA files of other libraries: peft's folder and diffusers' file, in and out, with alpha.

Both hold A [rank, in] and B [out, rank] unscaled, as megadiff does. alpha is in peft's
adapter_config.json and in the metadata of diffusers' file. Without it, readers take alpha = rank.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megadiff.parallel.plan import LORA_A, LORA_B
from megadiff.tensors.lora_names import is_alpha
from megadiff.tensors.model_files import read_json
from megadiff.tensors.stored_tensors import FLOATS, StoredTensors, from_file, listed
from megadiff.tensors.tensor_file import TensorFile
from megadiff.types import LoraSpec, Shapes

ALONE = ""  # in place of a component: nothing in a LoRA's files says whose it is
PEFT_CONFIG = "adapter_config.json"
PEFT_WEIGHTS = "adapter_model.safetensors"
DIFFUSERS_WEIGHTS = "pytorch_lora_weights.safetensors"
PEFT_PREFIX = "base_model.model."  # peft wraps a model twice
# Whichever component: diffusers loads a file into one transformer, asking for this name.
DIFFUSERS_PREFIX = "transformer."
METADATA_KEY = "lora_adapter_metadata"  # diffusers': JSON, keys with the component in front
# Settings of peft's LoraConfig that would change what A and B mean, with the values that do not.
NEUTRAL = {
    "use_dora": False,
    "bias": "none",
    "lora_bias": False,
    "fan_in_fan_out": False,
    "modules_to_save": None,
    "layer_replication": None,
    "rank_pattern": None,
    "alpha_pattern": None,
    "alora_invocation_tokens": None,
}
# Values of peft's init_lora_weights that leave the base as it was. PiSSA, OLoRA, CorDA, LoftQ and
# LoRA-GA change it: their A and B belong to other weights than the file says.
KEEPS_BASE = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, kw_only=True)
class LoraFile:
    """A LoRA on disk. tensors: `<module>.lora_A.weight` and `<module>.lora_B.weight`."""

    path: Path
    spec: LoraSpec
    tensors: StoredTensors


def has_loras(path: Path) -> bool:
    """Tell whether path is a LoRA: one file, a folder of one, or of a folder for each component."""
    if path.is_file():
        # In every library's spelling: one that cannot be read is better refused as a LoRA.
        return any(
            re.search(r"\.(lora_|lora\.)(A|B|up|down)\b", name) for name in TensorFile(path).tensors
        )
    return _is_lora_folder(path) or bool(_component_folders(path))


def open_loras(path: Path) -> dict[str, LoraFile]:
    """Open component → its LoRA: a peft folder, a folder with diffusers' file, or such a file.

    One alone is under ALONE. For several components: a folder of such folders, each named as its
    component.
    Raises ValueError that names file, tensor and reason, or when the LoRAs are not of one kind.
    """
    if path.is_file() or _is_lora_folder(path):
        return {ALONE: _open_lora(path)}

    loras = {folder.name: _open_lora(folder) for folder in _component_folders(path)}
    first = next(iter(loras))
    wanted = loras[first].spec
    for name, lora in loras.items():
        spec = lora.spec
        if spec != wanted:
            raise ValueError(
                f"{path}: the LoRA of {name} (rank {spec.rank}, alpha {spec.alpha:g}, "
                f"{len(spec.modules)} modules) is unlike that of {first} (rank {wanted.rank}, "
                f"alpha {wanted.alpha:g}, {len(wanted.modules)} modules); convert each folder by "
                "itself"
            )
    return loras


def _is_lora_folder(path: Path) -> bool:
    return any((path / name).is_file() for name in (PEFT_CONFIG, DIFFUSERS_WEIGHTS))


def _component_folders(path: Path) -> list[Path]:
    """Return the folders of a LoRA for several components. A model's own folder is none."""
    # A pipeline's components may have a LoRA's file beside their weights.
    if any((path / name).is_file() for name in ("model_index.json", "config.json")):
        return []
    return [
        folder for folder in sorted(path.iterdir()) if folder.is_dir() and _is_lora_folder(folder)
    ]


def _open_lora(path: Path) -> LoraFile:
    config_file = path / PEFT_CONFIG
    if config_file.is_file():
        weights = path / PEFT_WEIGHTS
        if not weights.is_file():
            raise ValueError(
                f"{weights} is missing; only safetensors are read, save the adapter as such"
            )
        config = read_json(config_file)
        return _lora(TensorFile(weights), PEFT_PREFIX, config=config, config_file=config_file)

    file = TensorFile(path if path.is_file() else path / DIFFUSERS_WEIGHTS)
    said = _diffusers_config(file)
    return _lora(file, DIFFUSERS_PREFIX, config=said, config_file=file.path)


def peft_config(spec: LoraSpec, *, base: Path | None) -> dict[str, object]:
    """Return what adapter_config.json holds."""
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": str(base) if base else None,
        "r": spec.rank,
        "lora_alpha": _plain(spec.alpha),  # as peft writes a whole number
        "target_modules": list(spec.modules),  # whole names, so that no other module matches
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }


def diffusers_metadata(spec: LoraSpec) -> dict[str, str]:
    """Return the metadata of diffusers' file."""
    config = {
        "r": spec.rank,
        "lora_alpha": _plain(spec.alpha),
        "target_modules": list(spec.modules),
    }
    packed = {f"{DIFFUSERS_PREFIX}{key}": value for key, value in config.items()}
    return {"format": "pt", METADATA_KEY: json.dumps(packed, indent=2, sort_keys=True)}


def lora_misfits(lora: LoraFile, shapes: Shapes) -> list[str]:
    """List the pairs that do not fit the model's weights. shapes: of its parameters."""
    problems = []
    for module in lora.spec.modules:
        # rows of B, columns of A: the shape of their product
        shape = (
            lora.tensors[f"{module}.{LORA_B}"].meta.shape[0],
            lora.tensors[f"{module}.{LORA_A}"].meta.shape[1],
        )
        weight = shapes.get(f"{module}.weight")
        if weight is None or len(weight) != 2:
            problems.append(f"{lora.path}: {module} is no linear layer of the model")
        elif shape != tuple(weight):
            problems.append(
                f"{lora.path}: {module} is for a weight {shape}, the model's is {tuple(weight)}"
            )
    return problems


def _lora(
    file: TensorFile,
    prefix: str,
    *,
    config: Mapping[str, object] | None,
    config_file: Path,
) -> LoraFile:
    tensors: StoredTensors = {}
    problems = []

    for key, meta in file.tensors.items():
        name = key.removeprefix(prefix)
        if not key.startswith(prefix) or not name.endswith((f".{LORA_A}", f".{LORA_B}")):
            problems.append(f"{key} is neither {prefix}MODULE.{LORA_A} nor {prefix}MODULE.{LORA_B}")
        elif meta.dtype not in FLOATS or len(meta.shape) != 2:
            problems.append(f"{key} is {meta.dtype} {meta.shape}, not a matrix of floats")
        tensors[name] = from_file(file, key)

    # All problems are told at once, so the pairs are looked at though names were wrong.
    modules = sorted({name.rsplit(".", 2)[0] for name in tensors})
    for module in modules:
        for suffix in (LORA_A, LORA_B):
            if f"{module}.{suffix}" not in tensors:
                problems.append(f"{module}.{suffix} is missing")

    if problems or not modules:
        raise ValueError(
            f"{file.path} is no LoRA that can be read: {listed(problems) or 'it holds no tensor'}"
        )

    rank = _one_rank(tensors, modules, file.path)
    # Without a word on alpha diffusers scales by 1: alpha = rank.
    alpha = _alpha(config, rank, config_file) if config is not None else float(rank)
    spec = LoraSpec(rank=rank, alpha=alpha, modules=tuple(modules))
    return LoraFile(path=file.path, spec=spec, tensors=tensors)


def _one_rank(tensors: StoredTensors, modules: list[str], path: Path) -> int:
    ranks: dict[int, str] = {}
    for module in modules:
        for suffix, dim in ((LORA_A, 0), (LORA_B, 1)):
            name = f"{module}.{suffix}"
            ranks.setdefault(tensors[name].meta.shape[dim], name)

    if len(ranks) > 1:
        raise ValueError(
            f"{path} has several ranks: "
            f"{', '.join(f'{rank} of {name}' for rank, name in ranks.items())}; megadiff has one "
            "lora.rank for all modules"
        )
    (rank,) = ranks
    if rank < 1:
        raise ValueError(f"{path} has rank {rank}, so its matrices hold no number; train it anew")
    return rank


def _alpha(config: Mapping[str, object], rank: int, path: Path) -> float:
    odd = [
        f"{key}={config[key]!r:.80}"
        for key, value in NEUTRAL.items()
        if config.get(key, value) not in (value, [], {})
    ]
    if odd:
        raise ValueError(
            f"{path}: {', '.join(odd)} is more than A and B of one rank and alpha, which is all "
            "megadiff takes"
        )

    init = config.get("init_lora_weights")
    if init not in KEEPS_BASE:
        raise ValueError(
            f"{path}: init_lora_weights={init!r:.80}: such an adapter belongs to a base that peft "
            "has changed, not to the model's own weights; save it anew, with "
            "path_initial_model_for_weight_conversion, which makes a plain LoRA of it"
        )

    rank_said = config.get("r", rank)
    if rank_said != rank:
        raise ValueError(
            f"{path}: r={rank_said}, but the tensors have rank {rank}; they are not of one adapter"
        )
    alpha = config.get("lora_alpha")
    if not is_alpha(alpha):
        raise ValueError(f"{path}: lora_alpha={alpha!r:.80} is no positive number")

    use_rslora = config.get("use_rslora", False)
    # A text such as "false" would count as true.
    if type(use_rslora) is not bool:
        raise ValueError(f"{path}: use_rslora={use_rslora!r:.80} must be true or false")
    return float(alpha * math.sqrt(rank)) if use_rslora else float(alpha)  # rslora: alpha / √rank


def _diffusers_config(file: TensorFile) -> dict[str, object] | None:
    """Parse what diffusers put into the file's metadata; None where there is nothing."""
    if METADATA_KEY not in file.metadata:
        return None
    try:
        packed = json.loads(file.metadata[METADATA_KEY])
        return {key.removeprefix(DIFFUSERS_PREFIX): value for key, value in packed.items()}
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{file.path}: the metadata {METADATA_KEY} is no JSON object") from error


def _plain(number: float) -> float | int:
    return int(number) if number == int(number) else number
