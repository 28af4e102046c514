"""Open diffusers folders: which file holds which tensor, and whether all fit config.json."""

from __future__ import annotations

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
    is_whole_model,
)
from megadiff.tensors.model_files import (
    ROOT_CONFIGS,
    ROOT_FILE,
    STEMS,
    indexed_files,
    transformer_keys,
    weight_files,
)
from megadiff.tensors.stored_tensors import FLOATS, StoredTensors, from_file, listed
from megadiff.tensors.tensor_file import TensorFile, TensorMeta, canonical_order
from megadiff.types import Shapes

COMPONENT = "transformer"  # what a component is called that comes without a pipeline to say so
WEIGHTS_NAME = "diffusion_pytorch_model.safetensors"
# In older formats, too: left beside new weights, a library could load the old ones.
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf")


@dataclass(frozen=True, kw_only=True)
class Component:
    """A trained component of a model. folder: with its config.json. files: its weights.

    where: its path within a folder like the model's. family: as of component_model.
    is_single_file: it came as one file without a folder around it.
    is_in_root: the file has BAGEL's layout, which holds other networks as well.
    """

    folder: Path
    where: Path
    files: tuple[Path, ...]
    family: str = ""
    is_single_file: bool = False
    is_in_root: bool = False

    @cached_property
    def model(self) -> ComponentModel:
        """Describe the model by config.json alone. Raises ValueError for an unknown kind."""
        return component_model(self.folder, self.family)

    @cached_property
    def opened(self) -> dict[str, TensorFile]:
        """Open the weight files, by the names that they are written under.

        Raises ValueError for one that is not whole.
        """
        if self.is_single_file:
            # It is found under these names only.
            name = ROOT_FILE if self.is_in_root else WEIGHTS_NAME
            return {name: TensorFile(self.files[0])}
        return {path.name: TensorFile(path) for path in self.files}

    @cached_property
    def keys(self) -> dict[str, str]:
        """Return the model's names of weights → their keys in the files, where these differ."""
        # Not by the file's name: ema.safetensors may be another model's running average.
        if not self.is_in_root:
            return {}
        return transformer_keys(self.opened[ROOT_FILE].tensors)

    @cached_property
    def constants(self) -> StoredTensors:
        """Return what a conversion keeps as it is: the plan's constants and other networks."""
        constants = {}
        weights = set(self.keys.values())
        for file in self.opened.values():
            for key in file.tensors:
                is_other = bool(weights) and key not in weights
                if is_other or key in self.model.plan.constants:
                    constants[key] = from_file(file, key)
        return constants

    @cached_property
    def index(self) -> Path | None:
        """Find the index that lists the weight files; None without one.

        Raises ValueError for a file that is no index.
        """
        if self.is_single_file:
            return None
        for stem in STEMS:
            path = self.folder / f"{stem}.safetensors.index.json"
            if path.is_file() and self.opened.keys() & set(indexed_files(path)):
                return path
        return None

    def by_keys(self, tensors: StoredTensors) -> StoredTensors:
        """Return tensors under their keys in the files."""
        return {self.keys.get(name, name): stored for name, stored in tensors.items()}

    @cached_property
    def tensors(self) -> StoredTensors:
        """Return the weights, all there and as config.json wants them, in the model's order.

        Raises ValueError that names file and tensor otherwise.
        """
        tensors: StoredTensors = {}
        problems = []
        names = {key: name for name, key in self.keys.items()}

        for file in self.opened.values():
            for key in file.tensors:
                name = names.get(key, key)
                if name in tensors:
                    problems.append(f"{file.path}: {name} is in {tensors[name].path.name} as well")
                tensors[name] = from_file(file, key)

        for name in self.constants:
            del tensors[name]
        problems += misfits(tensors, self.model.shapes, dtypes=FLOATS)
        if problems:
            weights = self.files[0] if len(self.files) == 1 else self.files[0].parent
            raise ValueError(
                f"{weights} does not fit {self.folder}/config.json: {listed(problems)}"
            )

        # Files may hold them in any order; checkpoints have the model's.
        return {name: tensors[name] for name in self.model.shapes}


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """A model on disk. path: as it was named. components: those that are trained, in its order.

    home: the folder of the model that it is of, which is path, but for a single file.
    family: "module:Class" where one was named.
    """

    path: Path
    home: Path
    components: Mapping[str, Component]
    family: str = ""


def open_model(path: Path, family: str = "") -> ModelFolder:
    """Open a pipeline folder or a trained component's. family: "module:Class", or any.

    Raises ValueError as check_model_folder does, or that says what it is not.
    """
    if (path / "model_index.json").is_file():
        check_model_folder(path, family)
        components = {
            name: Component(
                folder=path / name,
                where=Path(name),
                files=tuple(weight_files(path / name)),
                family=family,
            )
            for name in build_adapter(path, family).components
        }
        return ModelFolder(path=path, home=path, components=components, family=family)

    if (path / "config.json").is_file():
        root = path / ROOT_FILE
        # In a component's folder a file of that name is somebody else's.
        is_in_root = root.is_file() and is_whole_model(path, family)
        component = Component(
            folder=path,
            where=Path(),
            files=(root,) if is_in_root else tuple(weight_files(path)),
            family=family,
            is_in_root=is_in_root,
        )
        components = {COMPONENT: component}
        return ModelFolder(path=path, home=path, components=components, family=family)

    raise ValueError(
        f"{path} is no diffusers model: neither a pipeline folder (model_index.json) nor a "
        "component's (config.json)"
    )


def open_single_file(path: Path, *, base: Path | None, family: str = "") -> ModelFolder:
    """Open one file of all a component's weights. config.json lies beside it, or in the base."""
    home = base or path.parent
    folder = _only_component(open_model(base, family)) if base else home
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{folder} holds no config.json, which says what {path.name} must hold; name a model "
            "folder with --base"
        )
    component = Component(
        folder=folder,
        where=Path(),
        files=(path,),
        family=family,
        is_single_file=True,
        is_in_root=path.name == ROOT_FILE and is_whole_model(folder, family),
    )

    return ModelFolder(path=path, home=home, components={COMPONENT: component}, family=family)


def _only_component(base: ModelFolder) -> Path:
    components = base.components.values()
    if len(components) > 1:
        folders = " or ".join(str(component.folder) for component in components)
        raise ValueError(
            f"{base.path} has {len(components)} components that one file may be of; give --base "
            f"{folders}"
        )
    return next(iter(components)).folder


def misfits(
    tensors: StoredTensors,
    shapes: Shapes,
    *,
    dtypes: Sequence[torch.dtype],
) -> list[str]:
    """List what is missing, extra, or of another shape or dtype than a model has, with its file."""
    problems = [f"{name} is missing" for name in sorted(shapes.keys() - tensors.keys())]
    problems += [
        f"{tensors[name].path}: {name} is not in the model"
        for name in sorted(tensors.keys() - shapes.keys())
    ]

    for name in sorted(shapes.keys() & tensors.keys()):
        meta = tensors[name].meta
        where = f"{tensors[name].path}: {name}"
        if meta.shape != tuple(shapes[name]):
            problems.append(f"{where} has shape {meta.shape}, the model's is {tuple(shapes[name])}")
        if meta.dtype not in dtypes:
            wanted = " or ".join(map(_short, dtypes))
            problems.append(f"{where} is {_short(meta.dtype)}, weights must be {wanted}")

    return problems


def file_tensors(base: Component, tensors: StoredTensors) -> dict[str, dict[str, TensorMeta]]:
    """Return file name → its tensors in their order, spread over files as the base's are.

    Where the dtypes are the base's, the order is too, so that the same weights give the same file.
    """
    files = {}
    for name, file in base.opened.items():
        metas = {key: tensors[key].meta for key in file.tensors}
        # Other dtypes would lie unaligned in the base's order.
        files[name] = metas if metas == file.tensors else canonical_order(metas)
    return files


def rest_of(base: ModelFolder, *, is_left_out: Callable[[Path], bool] | None = None) -> OtherFiles:
    """Find all of the base but its components' weights, and the index of those.

    is_left_out: tells of a path within the base that it is not wanted either.
    Raises ValueError as other_files does.
    """
    single = next(
        (component for component in base.components.values() if component.is_single_file), None
    )

    # The folder around a single file may hold anything.
    if single:
        configs = ROOT_CONFIGS if single.is_in_root else ("config.json",)
        return OtherFiles(root=single.folder, files=tuple(map(Path, configs)), folders=())

    # Only trained weights are written anew: other components keep theirs, and so does a root, which
    # has weights of other networks beside its own.
    written: set[Path] = set()
    weighted: set[Path] = set()
    for component in base.components.values():
        written |= {component.where / file.name for file in component.files}
        if component.index:
            written.add(component.where / component.index.name)
        if not component.is_in_root:
            weighted.add(component.where)

    def is_unwanted(path: Path) -> bool:
        is_stale = path.parent in weighted and is_weights(path.name)
        is_other = is_left_out is not None and is_left_out(path)
        return path in written or is_stale or is_other

    return other_files(base.path, is_left_out=is_unwanted)


def is_weights(name: str) -> bool:
    """Tell whether a file's name is that of weights, or of an index, a variant's among them."""
    # diffusers calls an index of a variant ….safetensors.index.fp16.json
    is_index = ".index." in name and name.endswith(".json")
    return is_index or name.endswith(WEIGHT_SUFFIXES)


def whole_checkpoints(base: ModelFolder) -> list[Path]:
    """Return the weight files in a pipeline's root, relative to it: the whole model in one file.

    No component is loaded from them, but loaders of single files and web interfaces take them.
    """
    if not (base.path / "model_index.json").is_file():
        return []
    paths = sorted(base.path.iterdir())
    return [Path(path.name) for path in paths if is_weights(path.name) and path.is_file()]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
