"""List the model families, and check that a folder holds a whole model of one of them.

A family is its adapter class, named as "module:Class". Other packages register theirs as entry
points of the group `megadiff.families`; a run may name one as `model.family`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from torch import nn

from megadiff.models.adapter import ModelAdapter
from megadiff.models.pipeline_folder import INDEX, check_sizes, read_index
from megadiff.parallel.plan import ParallelPlan
from megadiff.process.doors import import_class
from megadiff.tensors.model_files import read_json
from megadiff.types import Shape

FAMILIES = (
    "megadiff.models.qwen_image.adapter:QwenImageAdapter",
    "megadiff.models.qwen_image_edit.adapter:QwenImageEditAdapter",
    "megadiff.models.wan22.adapter:WanAdapter",
    "megadiff.models.wan22.image_to_video:WanImageToVideoAdapter",
    "megadiff.models.bagel.adapter:BagelAdapter",
    "megadiff.models.sd3.adapter:SD3Adapter",
    "megadiff.models.z_image.adapter:ZImageAdapter",
)
ENTRY_POINTS = "megadiff.families"
# class attributes that have no default
REQUIRED = ("title", "pipeline_class", "transformer_class", "rollout_pipeline", "plan")
CONSTRUCTOR_ERRORS = (  # what constructors say of values that they cannot take
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
)

Family = type[ModelAdapter]


@dataclass(frozen=True, kw_only=True)
class ComponentModel:
    """Describe a trained component by its config.json.

    shapes: of all its parameters, in the module's order.
    """

    shapes: dict[str, Shape]
    plan: ParallelPlan
    num_heads: int

    @property
    def trained_shapes(self) -> dict[str, Shape]:
        """Return the shapes of what a checkpoint holds: all but what is frozen."""
        return self.plan.trainable(self.shapes)


@cache
def families() -> tuple[Family, ...]:
    """Return the families of megadiff, and after them those of installed packages.

    Raises ValueError for an entry point that names none.
    """
    classes = [_imported(path, key=f"family {path}") for path in FAMILIES]
    for entry in entry_points(group=ENTRY_POINTS):
        package = entry.dist.name if entry.dist else "a package"
        classes.append(_imported(entry.value, key=f"{package}'s entry point {entry.name}"))
    return tuple(classes)


def _imported(path: str, *, key: str) -> Family:
    """Return the class that "module:Class" names. key: who named it, for messages."""
    family: Family = import_class(path, ModelAdapter, key=key)
    missing = [name for name in REQUIRED if not getattr(family, name, None)]
    if missing:
        raise ValueError(
            f"{key}: {family.__name__} lacks {', '.join(missing)}; set these class attributes, see "
            "docs/adding_a_model.md"
        )
    module_name = family.rollout_pipeline.partition(":")[0]
    if not _is_module(module_name):
        raise ValueError(
            f"{key}: {family.__name__}.rollout_pipeline={family.rollout_pipeline!r}, but there is "
            f"no module {module_name!r}; name the replica's class as module:Class"
        )
    return family


def _is_module(name: str) -> bool:
    """Look for a module without importing it: the replica's side needs vllm-omni."""
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _choices(family: str) -> tuple[Family, ...]:
    """Return the family that a config names, or all."""
    return (_imported(family, key=f"model.family={family}"),) if family else families()


def family_of(folder: Path, family: str = "") -> Family:
    """Return the family that recognises a model folder. family: "module:Class", the only choice.

    Raises ValueError when none does, or several do.
    """
    if not folder.is_dir():
        raise ValueError(_no_folder(folder))
    choices = _choices(family)
    index = read_index(folder)
    matching = [choice for choice in choices if choice.recognises(folder, index)]
    if len(matching) == 1:
        return matching[0]

    if matching:
        names = " and ".join(_path_of(choice) for choice in matching)
        raise ValueError(
            f"{folder} is a {index.get('_class_name')!r} for {names}; choose by "
            f"model.family={_path_of(matching[0])}, or uninstall the other's package"
        )
    class_name = read_json(folder / INDEX).get("_class_name")
    supported = ", ".join(sorted(choice.pipeline_class for choice in choices))
    who = f"supported by model.family={family}" if family else "supported pipelines"
    raise ValueError(f"{folder} is a {class_name!r}; {who}: {supported}")


def _no_folder(folder: Path) -> str:
    """Say what is there in place of a model's folder, and what to give."""
    if folder.is_file():
        return f"{folder} is a file; give the folder with {INDEX}"

    where = "" if folder.is_absolute() else f", from here it is {folder.absolute()}"
    text = f"model folder {folder} does not exist; give a diffusers pipeline folder{where}"
    hub_name = re.fullmatch(r"[\w.-]+/([\w.-]+)", str(folder))
    if hub_name and not folder.parent.exists():
        target = f"models/{hub_name[1].lower().replace('-', '_')}"
        text += (
            f". Nothing is fetched from a hub: `hf download {folder} --local-dir {target}`, then "
            f"model.path={target}"
        )
    return text


def _path_of(family: Family) -> str:
    return f"{family.__module__}:{family.__qualname__}"


def check_model_folder(folder: Path, family: str = "") -> Family:
    """Return the family of a whole model folder.

    Reads headers only: seconds at most, before any engine starts. Raises ValueError that names
    what is missing, unknown or cut short.
    """
    choice = family_of(folder, family)
    for problem in choice.folder_problems(folder, read_index(folder)):
        raise ValueError(problem)
    return choice


def build_adapter(folder: Path, family: str = "") -> ModelAdapter:
    """Return the trainer's adapter of the folder's model family.

    Raises ValueError as `family_of` does.
    """
    choice = family_of(folder, family)
    for name, path in choice.component_configs(folder, read_index(folder)).items():
        _check_config(folder / name, read_json(path), (choice,))
    return choice(folder)


def is_whole_model(folder: Path, family: str = "") -> bool:
    """Tell whether a folder is a whole model without components' folders, as BAGEL's is."""
    index = read_index(folder)
    return not index and any(choice.recognises(folder, index) for choice in _choices(family))


def component_model(folder: Path, family: str = "") -> ComponentModel:
    """Return the model of a trained component's folder, with a pipeline around it or without.

    Raises ValueError for another kind of model, and for one that several families have.
    """
    choices = _choices(family)
    for choice in choices:
        # a model whose weights lie in its own folder, with no component's around them
        if choice.recognises(folder, read_index(folder)):
            adapter = choice(folder)
            return _described(choice, adapter.empty_transformer(), adapter.num_heads)

    config = read_json(folder / "config.json")
    _check_config(folder, config, choices)
    choice = _choice_for(folder, str(config["_class_name"]), choices)
    from accelerate import init_empty_weights

    try:
        with init_empty_weights():
            transformer = choice.module_class().from_config(config)
    except CONSTRUCTOR_ERRORS as error:
        raise ValueError(
            f"{folder}/config.json makes no {choice.transformer_class}: {error!r}; fetch it again"
        ) from error
    return _described(choice, transformer, config[choice.size_keys[1]])


def _choice_for(folder: Path, class_name: str, choices: Sequence[Family]) -> Family:
    """Return the family of a component's class: that of the pipeline around it, if there is one.

    Raises ValueError where several with different plans are left.
    """
    matching = [choice for choice in choices if choice.transformer_class == class_name]
    index = read_index(folder.parent)
    of_pipeline = [choice for choice in matching if choice.recognises(folder.parent, index)]
    matching = of_pipeline or matching
    if any(choice.plan != matching[0].plan for choice in matching):
        names = " or ".join(_path_of(choice) for choice in matching)
        raise ValueError(
            f"{folder} is a {class_name}, which may be of {names}; choose by --family, or name a "
            "whole pipeline folder"
        )
    return matching[0]


def _described(family: Family, transformer: nn.Module, num_heads: int) -> ComponentModel:
    return ComponentModel(
        shapes={name: tuple(parameter.shape) for name, parameter in transformer.named_parameters()},
        plan=family.plan,
        num_heads=num_heads,
    )


def _check_config(folder: Path, config: Mapping[str, object], choices: Sequence[Family]) -> None:
    """Raise ValueError for the config of another class, or with sizes that are none."""
    class_name = config.get("_class_name")
    matching = [choice for choice in choices if choice.transformer_class == class_name]
    if not matching:
        classes = sorted({choice.transformer_class for choice in choices})
        raise ValueError(
            f"{folder} is a {class_name!r}; supported components: {', '.join(classes)}"
        )

    check_sizes(folder / "config.json", config, ("in_channels", *matching[0].size_keys))
