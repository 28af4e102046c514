"""List a model's tensors, name → (dtype, shape), from safetensors headers without loading data."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import TypedDict

from megadiff.tensors.model_files import open_weights, weight_files


class TensorRow(TypedDict):
    """Describe a tensor: its dtype, as in "bfloat16", and its shape."""

    dtype: str
    shape: list[int]


Manifest = dict[str, TensorRow]


def folder_manifest(
    model_folder: Path,
    components: tuple[str, ...],
    *,
    dtype: str,
    constants: Collection[str] = (),
) -> Manifest:
    """Return the manifest of components as `component.name`, with dtype as replicas hold them.

    constants: names of tensors in the files that are no weights, and so are left out.
    """
    manifest: Manifest = {}
    for component in components:
        for path in weight_files(model_folder / component):
            file = open_weights(path)
            for name in file.keys():
                if name in constants:
                    continue
                # of the header alone; the dtype is the replica's, whatever the file has
                shape = file.get_slice(name).get_shape()
                manifest[f"{component}.{name}"] = {"dtype": dtype, "shape": list(shape)}
    return manifest


def manifest_json(manifest: Manifest) -> bytes:
    return json.dumps(manifest, separators=(",", ":")).encode()


def name_difference(expected: set[str], found: set[str]) -> str:
    """Count and name what is missing and what is extra. Returns '' when the names are equal."""
    texts = []
    for label, names in (("missing", expected - found), ("extra", found - expected)):
        if names:
            # a model has two thousand names: five show what kind is wrong
            more = ", …" if len(names) > 5 else ""
            texts.append(f"{len(names)} {label}: {', '.join(sorted(names)[:5])}{more}")
    return "; ".join(texts)
