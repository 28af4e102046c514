"""A diffusers folder as source, base and destination of a conversion: which file holds which tensor, and whether all fit."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from megadiff.convert.other_files import OtherFiles, other_files
from megadiff.models.registry import (
    ComponentModel,
    build_adapter,
    check_model_folder,
    component_model,
)
from megadiff.tensors.model_files import read_json, weight_files
from megadiff.tensors.row_sources import FileRows
from megadiff.tensors.tensor_file import TensorFile, TensorMeta, canonical_order

COMPONENT = "transformer"  # what a component is called that comes without a pipeline to say so
WEIGHTS_NAME = "diffusion_pytorch_model.safetensors"
WEIGHT_SUFFIXES = (
    ".safetensors",
    ".bin",
    ".pt",
    ".ckpt",
    ".safetensors.index.json",
    ".bin.index.json",
)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
NUM_NAMED = 8  # problems that one message lists


@dataclass(frozen=True, kw_only=True)
class Component:
    """A trained component of a model. folder: with its config.json. files: its weights.

    name: its folder's in a pipeline. where: its place in a folder like the model's. is_single_file: it came as one file
    without a folder around it.
    """

    name: str
    folder: Path
    where: Path
    files: tuple[Path, ...]
    is_single_file: bool = False

    @cached_property
    def model(self) -> ComponentModel:
        """By config.json alone. Raises ValueError for an unknown kind of model."""
        return component_model(self.folder)

    @cached_property
    def opened(self) -> dict[str, TensorFile]:
        """Name of a weight file → the file. Raises ValueError for one that is not whole."""
        return {path.name: TensorFile(path) for path in self.files}

    def rows(self) -> FileRows:
        """The weights, all there and as config.json wants them. Raises ValueError that names file and tensor otherwise."""
        keys: dict[str, tuple[TensorFile, str]] = {}
        problems = []
        for file in self.opened.values():
            for name in file.tensors:
                if name in keys:
                    problems.append(f"{file.path}: {name} is in {keys[name][0].path.name} as well")
                keys[name] = (file, name)
        rows = FileRows(keys)
        of = f"{self.folder}/config.json"
        problems += misfits(rows.tensors, self.model.shapes, file_of=rows.file_of, dtypes=FLOATS)
        if problems:
            raise ValueError(f"{self._weights_place()} does not fit {of}: {listed(problems)}")
        return FileRows({name: keys[name] for name in self.model.shapes})

    def _weights_place(self) -> Path:
        return self.files[0] if len(self.files) == 1 else self.files[0].parent


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """path: as it was named. home: the folder of the model that it is of; path, but for a single file.

    components: those that are trained, by name, in the model's order.
    """

    path: Path
    home: Path
    components: Mapping[str, Component]


def open_model(path: Path) -> ModelFolder:
    """A pipeline folder or a trained component's. Raises ValueError as check_model_folder does, or that says what it is not."""
    if (path / "model_index.json").is_file():
        check_model_folder(path)
        found = [
            Component(
                name=name,
                folder=path / name,
                where=Path(name),
                files=tuple(weight_files(path / name)),
            )
            for name in build_adapter(path).components
        ]
        return ModelFolder(
            path=path, home=path, components={component.name: component for component in found}
        )
    if (path / "config.json").is_file():
        component = Component(
            name=COMPONENT, folder=path, where=Path(), files=tuple(weight_files(path))
        )
        return ModelFolder(path=path, home=path, components={COMPONENT: component})
    raise ValueError(
        f"{path} is no diffusers model: neither a pipeline folder (model_index.json) nor a component's (config.json)"
    )


def open_single_file(path: Path, *, base: Path | None) -> ModelFolder:
    """One file of all a component's weights; its config.json lies beside it, or in the base."""
    folder, home = (_only_component(base), base) if base else (path.parent, path.parent)
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{folder} holds no config.json, which says what {path.name} must hold; name a model folder with --base"
        )
    component = Component(
        name=COMPONENT, folder=folder, where=Path(), files=(path,), is_single_file=True
    )
    return ModelFolder(path=path, home=home, components={COMPONENT: component})


def _only_component(base: Path) -> Path:
    components = open_model(base).components.values()
    if len(components) > 1:
        folders = " or ".join(str(component.folder) for component in components)
        raise ValueError(
            f"{base} has {len(components)} components that one file may be of; give --base {folders}"
        )
    return next(iter(components)).folder


def misfits(
    tensors: Mapping[str, TensorMeta],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    file_of: Callable[[str], str],
    dtypes: Sequence[torch.dtype],
) -> list[str]:
    """What is missing, extra, or of another shape or dtype than a model has, each with its file."""
    problems = [f"{name} is missing" for name in sorted(shapes.keys() - tensors.keys())]
    problems += [
        f"{file_of(name)}: {name} is not in the model"
        for name in sorted(tensors.keys() - shapes.keys())
    ]
    for name in sorted(shapes.keys() & tensors.keys()):
        meta = tensors[name]
        if meta.shape != tuple(shapes[name]):
            problems.append(
                f"{file_of(name)}: {name} has shape {meta.shape}, the model's is {tuple(shapes[name])}"
            )
        if meta.dtype not in dtypes:
            wanted = " or ".join(map(_short, dtypes))
            problems.append(
                f"{file_of(name)}: {name} is {_short(meta.dtype)}, weights must be {wanted}"
            )
    return problems


def listed(problems: Sequence[str]) -> str:
    more = f" and {len(problems) - NUM_NAMED} more" if len(problems) > NUM_NAMED else ""
    return "; ".join(problems[:NUM_NAMED]) + more


def file_tensors(
    base: Component, dtypes: Mapping[str, torch.dtype]
) -> dict[str, dict[str, TensorMeta]]:
    """File name → its tensors in their order, as the base's files have them but for the dtypes.

    Where the dtypes are the base's, the order is too, so that the same weights give the same file.
    """
    files = {}
    for name, file in base.opened.items():
        tensors = {
            key: TensorMeta(dtype=dtypes[key], shape=meta.shape)
            for key, meta in file.tensors.items()
        }
        kept = tensors if tensors == file.tensors else canonical_order(tensors)
        files[WEIGHTS_NAME if base.is_single_file else name] = kept
    return files


def file_metadata(base: Component, files: Sequence[str]) -> dict[str, dict[str, str]]:
    """File name → its metadata, the base's."""
    return dict(zip(files, (file.metadata for file in base.opened.values()), strict=True))


def rest_of(base: ModelFolder) -> OtherFiles:
    """Find all of the base but its components' weights, and the index of those.

    Raises ValueError as other_files does.
    """
    single = next(
        (component for component in base.components.values() if component.is_single_file), None
    )
    if single:
        return OtherFiles(root=single.folder, files=(Path("config.json"),), folders=())
    weighted = {component.where for component in base.components.values()}

    def is_weight(path: Path) -> bool:
        return path.parent in weighted and path.name.endswith(WEIGHT_SUFFIXES)

    return other_files(base.path, is_left_out=is_weight)


def write_index(
    base: Component, folder: Path, files: Mapping[str, Mapping[str, TensorMeta]]
) -> None:
    """The index of a component in several files: the base's, with the size that the tensors have now."""
    if len(files) == 1 and not _index_file(base):
        return
    found = _index_file(base)
    index = read_json(found) if found else {}
    total = sum(meta.num_bytes for tensors in files.values() for meta in tensors.values())
    metadata = {**index.get("metadata", {}), "total_size": total}
    index |= {
        "metadata": metadata,
        "weight_map": {name: file for file, held in files.items() for name in held},
    }
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"  # as diffusers writes it
    (folder / found.name).write_text(text, encoding="utf-8")


def _index_file(base: Component) -> Path | None:
    if base.is_single_file:
        return None
    return next(iter(sorted(base.folder.glob("*.safetensors.index.json"))), None)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
