"""A diffusers folder as source, base and destination of a conversion: which file holds which tensor, and whether all fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from megadiff.models.files import read_json, weight_files
from megadiff.models.registry import ComponentModel, check_model_folder, component_model
from megadiff.weights.row_sources import FileRows
from megadiff.weights.tensor_file import TensorFile, TensorMeta, canonical_order

COMPONENT = "transformer"  # of a pipeline, that is trained and hence converted
WEIGHTS_NAME = "diffusion_pytorch_model.safetensors"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".ckpt", ".safetensors.index.json", ".bin.index.json")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
NUM_NAMED = 8  # problems that one message lists


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """path: as it was named. component: the folder with the trained component's config.json. files: its weights.

    home: the folder of the model that they are of; path, but for a single file. is_pipeline: whether path is a whole
    pipeline, with component in it.
    """

    path: Path
    home: Path
    component: Path
    is_pipeline: bool
    files: tuple[Path, ...]

    @cached_property
    def model(self) -> ComponentModel:
        """By config.json alone. Raises ValueError for an unknown kind of model."""
        return component_model(self.component)

    @cached_property
    def opened(self) -> dict[str, TensorFile]:
        """Name of a weight file → the file. Raises ValueError for one that is not whole."""
        return {path.name: TensorFile(path) for path in self.files}

    @property
    def where(self) -> Path:
        """The component's place in a folder like this one."""
        return Path(COMPONENT) if self.is_pipeline else Path()

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
        of = f"{self.component}/config.json"
        problems += misfits(rows.tensors, self.model.shapes, file_of=rows.file_of, dtypes=FLOATS)
        if problems:
            raise ValueError(f"{self._weights_place()} does not fit {of}: {listed(problems)}")
        return FileRows({name: keys[name] for name in self.model.shapes})

    def _weights_place(self) -> Path:
        return self.files[0] if len(self.files) == 1 else self.files[0].parent


def open_model(path: Path) -> ModelFolder:
    """A pipeline folder or a trained component's. Raises ValueError as check_model_folder does, or that says what it is not."""
    if (path / "model_index.json").is_file():
        check_model_folder(path)
        component = path / COMPONENT
        files = tuple(weight_files(component))
        return ModelFolder(path=path, home=path, component=component, is_pipeline=True, files=files)
    if (path / "config.json").is_file():
        files = tuple(weight_files(path))
        return ModelFolder(path=path, home=path, component=path, is_pipeline=False, files=files)
    raise ValueError(
        f"{path} is no diffusers model: neither a pipeline folder (model_index.json) nor a component's (config.json)"
    )


def open_single_file(path: Path, *, base: Path | None) -> ModelFolder:
    """One file of all the component's weights; its config.json lies beside it, or in the base."""
    component, home = (open_model(base).component, base) if base else (path.parent, path.parent)
    if not (component / "config.json").is_file():
        raise ValueError(
            f"{component} holds no config.json, which says what {path.name} must hold; name a model folder with --base"
        )
    return ModelFolder(path=path, home=home, component=component, is_pipeline=False, files=(path,))


def misfits(
    tensors: Mapping[str, TensorMeta],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    file_of: Callable[[str], str],
    dtypes: Sequence[torch.dtype],
) -> list[str]:
    """What is missing, extra, or of another shape or dtype than a model has, each with its file."""
    problems = [f"{name} is missing" for name in sorted(shapes.keys() - tensors.keys())]
    problems += [f"{file_of(name)}: {name} is not in the model" for name in sorted(tensors.keys() - shapes.keys())]
    for name in sorted(shapes.keys() & tensors.keys()):
        meta = tensors[name]
        if meta.shape != tuple(shapes[name]):
            problems.append(f"{file_of(name)}: {name} has shape {meta.shape}, the model's is {tuple(shapes[name])}")
        if meta.dtype not in dtypes:
            wanted = " or ".join(map(_short, dtypes))
            problems.append(f"{file_of(name)}: {name} is {_short(meta.dtype)}, weights must be {wanted}")
    return problems


def listed(problems: Sequence[str]) -> str:
    more = f" and {len(problems) - NUM_NAMED} more" if len(problems) > NUM_NAMED else ""
    return "; ".join(problems[:NUM_NAMED]) + more


def file_tensors(base: ModelFolder, dtypes: Mapping[str, torch.dtype]) -> dict[str, dict[str, TensorMeta]]:
    """File name → its tensors in their order, as the base's files have them but for the dtypes.

    Where the dtypes are the base's, the order is too, so that the same weights give the same file.
    """
    files = {}
    for name, file in base.opened.items():
        tensors = {key: TensorMeta(dtype=dtypes[key], shape=meta.shape) for key, meta in file.tensors.items()}
        is_single = base.files == (base.path,)
        files[WEIGHTS_NAME if is_single else name] = tensors if tensors == file.tensors else canonical_order(tensors)
    return files


def file_metadata(base: ModelFolder, files: Sequence[str]) -> dict[str, dict[str, str]]:
    """File name → its metadata, the base's."""
    return dict(zip(files, (file.metadata for file in base.opened.values()), strict=True))


def copy_rest(base: ModelFolder, folder: Path) -> None:
    """All of the base but the component's weights, and the index of those. Symbolic links are followed. Raises OSError."""
    if base.files == (base.path,):
        shutil.copyfile(base.component / "config.json", folder / "config.json")
        return

    def left_out(parent: str, names: list[str]) -> list[str]:
        is_component = Path(parent) == base.component
        return [name for name in names if is_component and name.endswith(WEIGHT_SUFFIXES)]

    try:
        shutil.copytree(base.path, folder, ignore=left_out, dirs_exist_ok=True)
    except shutil.Error as error:  # a list of what went wrong
        raise OSError("; ".join(f"{source}: {reason}" for source, _, reason in error.args[0][:3])) from error


def write_index(base: ModelFolder, folder: Path, files: Mapping[str, Mapping[str, TensorMeta]]) -> None:
    """The index of a component in several files: the base's, with the size that the tensors have now."""
    if len(files) == 1 and not _index_file(base):
        return
    found = _index_file(base)
    index = read_json(found) if found else {}
    total = sum(meta.num_bytes for tensors in files.values() for meta in tensors.values())
    metadata = {**index.get("metadata", {}), "total_size": total}
    index |= {"metadata": metadata, "weight_map": {name: file for file, held in files.items() for name in held}}
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"  # as diffusers writes it
    (folder / found.name).write_text(text, encoding="utf-8")


def _index_file(base: ModelFolder) -> Path | None:
    return (
        next(iter(sorted(base.component.glob("*.safetensors.index.json"))), None)
        if base.files != (base.path,)
        else None
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
