"""Write the index of a component's weight files anew: which tensor is in which file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from megadiff.convert.model_folders import Component
from megadiff.tensors.model_files import indexed_files, read_json
from megadiff.tensors.stored_tensors import listed
from megadiff.tensors.tensor_file import TensorFile, TensorMeta


def new_index(
    base: Component, files: Mapping[str, Mapping[str, TensorMeta]]
) -> dict[str, object] | None:
    """Return a component's index with the tensors' size now, None where the base has none.

    files: that are written → their tensors. Raises ValueError for another file that it lists and
    that cannot be read.
    """
    if base.index is None:
        return None
    index = read_json(base.index)

    # Loaders read no file that an index does not list: BAGEL's autoencoder would be lost.
    weight_map = {name: file for name, file in index["weight_map"].items() if file not in files}
    total_size = 0
    for file in sorted(set(weight_map.values())):
        tensors = TensorFile(base.folder / file).tensors
        total_size += sum(
            meta.num_bytes for name, meta in tensors.items() if weight_map.get(name) == file
        )

    for file, metas in files.items():
        for name, meta in metas.items():
            total_size += meta.num_bytes
            weight_map[name] = file

    metadata = index.get("metadata")
    if not isinstance(metadata, dict):
        metadata = {}
    index["metadata"] = metadata | {"total_size": total_size}
    index["weight_map"] = weight_map
    return index


def write_index(base: Component, folder: Path, index: Mapping[str, object]) -> None:
    """Write new_index() into a component's folder."""
    assert base.index, "an index is made from the base's"
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"  # as diffusers writes it
    (folder / base.index.name).write_text(text, "utf-8")


def check_index(base: Component, folder: Path) -> None:
    """Raise ValueError unless a written index lists what its files hold, and all the base lists."""
    if base.index is None:
        return
    path = folder / base.index.name
    before = read_json(base.index)["weight_map"]
    listed_now = read_json(path)["weight_map"]

    problems = []
    for file in sorted({*indexed_files(base.index), *indexed_files(path)}):
        tensors = TensorFile(folder / file).tensors
        problems += [
            f"{name} of {file} is not listed"
            for name in tensors
            if before.get(name) == file and listed_now.get(name) != file
        ]
        problems += [
            f"{name} is not in {file}"
            for name, file_of_name in listed_now.items()
            if file_of_name == file and name not in tensors
        ]
    if problems:
        raise ValueError(
            f"{path} would not list its files' tensors: {listed(problems)}; nothing was written. "
            f"Compare {base.index} with the files beside it, and fetch what is damaged again"
        )
