"""LoRA files of other libraries: peft's folder and diffusers' file, in and out, with alpha.

Both hold A [rank, in] and B [out, rank] unscaled, as megadiff does. alpha is in adapter_config.json of peft and in the
metadata of diffusers' file; without it, readers take alpha = rank.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megadiff.convert.model_folders import COMPONENT, FLOATS, ModelFolder, listed
from megadiff.parallel.plan import LORA_A, LORA_B
from megadiff.tensors.lora_names import is_alpha
from megadiff.tensors.model_files import read_json
from megadiff.tensors.row_sources import FileRows
from megadiff.tensors.tensor_file import TensorFile, TensorMeta, canonical_order
from megadiff.types import LoraSpec

PEFT_CONFIG, PEFT_WEIGHTS, DIFFUSERS_WEIGHTS = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "pytorch_lora_weights.safetensors",
)
PEFT_PREFIX = "base_model.model."
DIFFUSERS_PREFIX = "transformer."  # whichever component: diffusers loads a file into one transformer, asking for this name
METADATA_KEY = "lora_adapter_metadata"  # diffusers': JSON, keys with the component in front
NEUTRAL = {  # settings of peft's LoraConfig that would change what A and B mean, with the values that do not
    "use_dora": False,
    "bias": "none",
    "lora_bias": False,
    "fan_in_fan_out": False,
    "modules_to_save": None,
    "layer_replication": None,
}


@dataclass(frozen=True, kw_only=True)
class LoraFile:
    """A LoRA as it lies on disk. rows: the tensors `<module>.lora_A.weight` and `<module>.lora_B.weight`."""

    path: Path
    spec: LoraSpec
    rows: FileRows


def has_loras(path: Path) -> bool:
    """Whether path is a LoRA: one file, a folder of one, or a folder of folders for a model's several components."""
    if path.is_file():
        return any(
            re.search(r"\.(lora_|lora\.)(A|B|up|down)\b", name) for name in TensorFile(path).tensors
        )
    return _is_lora_folder(path) or bool(_component_folders(path))


def open_loras(path: Path, *, base: ModelFolder | None) -> dict[str, LoraFile]:
    """Component → its LoRA: a peft folder, a folder with diffusers' file, or such a file; of several components a folder of
    such folders, each named as its component. One alone is of the base's only component, or of that with its folder's name.

    Raises ValueError that names file, tensor and reason, when the components' LoRAs are not of one kind, or when one alone
    could be of several components.
    """
    if path.is_file() or _is_lora_folder(path):
        return {_component_of_one(path, base): _open_lora(path)}
    found = {folder.name: _open_lora(folder) for folder in _component_folders(path)}
    (first, wanted), *others = ((name, lora.spec) for name, lora in found.items())
    for name, spec in others:
        if spec != wanted:
            raise ValueError(
                f"{path}: the LoRA of {name} (rank {spec.rank}, alpha {spec.alpha:g}, {len(spec.modules)} modules) is unlike "
                f"that of {first} (rank {wanted.rank}, alpha {wanted.alpha:g}, {len(wanted.modules)} modules); convert each "
                "folder by itself"
            )
    return found


def _component_of_one(path: Path, base: ModelFolder | None) -> str:
    """Nothing in a LoRA's files says which of a model's components it is of."""
    if base is None or len(base.components) == 1:
        return COMPONENT
    name = (path.parent if path.is_file() else path).resolve().name
    if name not in base.components:
        folders = " or ".join(str(component.folder) for component in base.components.values())
        raise ValueError(
            f"{path} may be of any of the {len(base.components)} components of {base.path}: give --base {folders}, or "
            f"name its folder {' or '.join(base.components)}"
        )
    return name


def _is_lora_folder(path: Path) -> bool:
    return any((path / name).is_file() for name in (PEFT_CONFIG, DIFFUSERS_WEIGHTS))


def _component_folders(path: Path) -> list[Path]:
    """A model's own folder may hold LoRAs, but is none."""
    if any((path / name).is_file() for name in ("model_index.json", "config.json")):
        return []
    return [
        folder for folder in sorted(path.iterdir()) if folder.is_dir() and _is_lora_folder(folder)
    ]


def _open_lora(path: Path) -> LoraFile:
    if (path / PEFT_CONFIG).is_file():
        file = TensorFile(_present(path / PEFT_WEIGHTS))
        return _lora(
            file,
            prefix=PEFT_PREFIX,
            config=read_json(path / PEFT_CONFIG),
            config_file=path / PEFT_CONFIG,
        )
    file = TensorFile(path if path.is_file() else path / DIFFUSERS_WEIGHTS)
    return _lora(
        file, prefix=DIFFUSERS_PREFIX, config=_diffusers_config(file), config_file=file.path
    )


def peft_config(spec: LoraSpec, *, base: Path | None) -> dict[str, object]:
    """adapter_config.json. target_modules are whole names, so that no other module matches."""
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": str(base) if base else None,
        "r": spec.rank,
        "lora_alpha": _plain(spec.alpha),
        "target_modules": list(spec.modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }


def diffusers_metadata(spec: LoraSpec) -> dict[str, str]:
    """Of diffusers' file."""
    config = {
        "r": spec.rank,
        "lora_alpha": _plain(spec.alpha),
        "target_modules": list(spec.modules),
    }
    packed = {f"{DIFFUSERS_PREFIX}{key}": value for key, value in config.items()}
    return {"format": "pt", METADATA_KEY: json.dumps(packed, indent=2, sort_keys=True)}


def named_as(tensors: Mapping[str, TensorMeta], prefix: str) -> dict[str, TensorMeta]:
    """The tensors as peft (PEFT_PREFIX) or diffusers (`transformer.`) name them, in a file's order."""
    return canonical_order({f"{prefix}{name}": meta for name, meta in tensors.items()})


def lora_misfits(
    rows: FileRows, spec: LoraSpec, shapes: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """What does not fit the weights that the pairs are added to, each with its file. shapes: of the base's parameters."""
    problems = []
    for module in spec.modules:
        a, b = (rows.tensors[f"{module}.{part}"].shape for part in (LORA_A, LORA_B))
        weight = shapes.get(f"{module}.weight")
        where = rows.file_of(f"{module}.{LORA_A}")
        if weight is None or len(weight) != 2:
            problems.append(f"{where}: {module} is no linear layer of the model")
        elif (b[0], a[1]) != tuple(weight):
            problems.append(
                f"{where}: {module} is for a weight {(b[0], a[1])}, the model's is {tuple(weight)}"
            )
    return problems


def _lora(
    file: TensorFile, *, prefix: str, config: Mapping[str, object] | None, config_file: Path
) -> LoraFile:
    keys, problems = {}, []
    for name, meta in file.tensors.items():
        canonical = name.removeprefix(prefix)
        if not name.startswith(prefix) or not canonical.endswith((f".{LORA_A}", f".{LORA_B}")):
            problems.append(
                f"{name} is neither {prefix}MODULE.{LORA_A} nor {prefix}MODULE.{LORA_B}"
            )
        elif meta.dtype not in FLOATS or len(meta.shape) != 2:
            problems.append(f"{name} is {meta.dtype} {meta.shape}, not a matrix of floats")
        keys[canonical] = (file, name)
    modules = sorted({name.rsplit(".", 2)[0] for name in keys})
    problems += [
        f"{m}.{part} is missing"
        for m in modules
        for part in (LORA_A, LORA_B)
        if f"{m}.{part}" not in keys
    ]
    if problems or not modules:
        raise ValueError(
            f"{file.path} is no LoRA that can be read: {listed(problems) or 'it holds no tensor'}"
        )
    rows = FileRows(keys)
    rank = _one_rank(rows, modules, file.path)
    alpha = _alpha(config, rank, config_file) if config is not None else float(rank)
    return LoraFile(
        path=file.path, spec=LoraSpec(rank=rank, alpha=alpha, modules=tuple(modules)), rows=rows
    )


def _one_rank(rows: FileRows, modules: list[str], path: Path) -> int:
    ranks: dict[int, str] = {}
    for module in modules:
        for part, dim in ((LORA_A, 0), (LORA_B, 1)):
            ranks.setdefault(rows.tensors[f"{module}.{part}"].shape[dim], f"{module}.{part}")
    if len(ranks) > 1:
        raise ValueError(
            f"{path} has several ranks: {', '.join(f'{rank} of {name}' for rank, name in ranks.items())}; megadiff has one "
            "lora.rank for all modules"
        )
    return next(iter(ranks))


def _alpha(config: Mapping[str, object], rank: int, path: Path) -> float:
    odd = [
        f"{key}={config[key]!r}"
        for key, value in NEUTRAL.items()
        if config.get(key, value) not in (value, [], {})
    ]
    odd += [
        f"{key}={config[key]!r:.80}" for key in ("rank_pattern", "alpha_pattern") if config.get(key)
    ]
    if odd:
        raise ValueError(
            f"{path}: {', '.join(odd)} is more than A and B of one rank and alpha, which is all megadiff takes"
        )
    found, alpha = config.get("r", rank), config.get("lora_alpha")
    if found != rank:
        raise ValueError(
            f"{path}: r={found}, but the tensors have rank {rank}; they are not of one adapter"
        )
    if not is_alpha(alpha):
        raise ValueError(f"{path}: lora_alpha={alpha!r:.80} is no positive number")
    use_rslora = config.get("use_rslora", False)
    if type(use_rslora) is not bool:
        raise ValueError(f"{path}: use_rslora={use_rslora!r:.80} must be true or false")
    return float(alpha * math.sqrt(rank)) if use_rslora else float(alpha)  # rslora: alpha / √rank


def _diffusers_config(file: TensorFile) -> dict[str, object] | None:
    """What diffusers put into the file's metadata, without the component in front; None where there is nothing."""
    if METADATA_KEY not in file.metadata:
        return None
    try:
        packed = json.loads(file.metadata[METADATA_KEY])
        return {key.removeprefix(DIFFUSERS_PREFIX): value for key, value in packed.items()}
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{file.path}: the metadata {METADATA_KEY} is no JSON object") from error


def _present(path: Path) -> Path:
    if not path.is_file():
        raise ValueError(f"{path} is missing; only safetensors are read, save the adapter as such")
    return path


def _plain(number: float) -> float | int:
    return int(number) if number == int(number) else number
