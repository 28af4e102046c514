"""What tensors a model consists of: name → (dtype, shape), read from safetensors headers without loading data."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

Manifest = dict[str, dict[str, object]]  # name → {"dtype": "bfloat16", "shape": [3, 4]}


def component_files(folder: Path) -> list[Path]:
    """The safetensors files of one component folder, single or sharded with an index.

    Raises ValueError that names the folder or the file that is missing.
    """
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    if indexes:
        names = sorted(set(json.loads(indexes[0].read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        raise ValueError(f"{folder} holds no .safetensors file; is the model folder complete?")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{folder} lacks {', '.join(missing)}, which {indexes[0].name} lists; fetch the folder again")
    return [folder / name for name in names]


def folder_manifest(model_folder: Path, components: tuple[str, ...], *, dtype: str) -> Manifest:
    """Manifest of the named components under `component.name`, with dtype as the replicas hold them."""
    manifest: Manifest = {}
    for component in components:
        for path in component_files(model_folder / component):
            try:
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():
                        shape = file.get_slice(name).get_shape()
                        manifest[f"{component}.{name}"] = {"dtype": dtype, "shape": list(shape)}
            except SafetensorError as error:
                raise ValueError(f"{path} is not a whole safetensors file: {error}; fetch it again") from error
    return manifest


def name_difference(expected: set[str], found: set[str]) -> str:
    """'' when equal, else a text with the counts and the first names of what is missing and what is extra."""
    parts = []
    for label, names in (("missing", expected - found), ("extra", found - expected)):
        if names:
            parts.append(f"{len(names)} {label}: {', '.join(sorted(names)[:5])}{', …' if len(names) > 5 else ''}")
    return "; ".join(parts)
