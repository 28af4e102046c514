"""List the model families, and check that a folder holds a whole model of one of them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megadiff.models.adapter import ModelAdapter
from megadiff.parallel.plan import ParallelPlan
from megadiff.tensors.model_files import open_weights, read_json, weight_files

TRANSFORMER = "transformer"  # a component that all pipelines have
SIZES = ("in_channels", "num_layers", "num_attention_heads", "attention_head_dim")  # of all
LARGEST_SIZE = 1 << 16  # of those; a module with 10**9 layers would be built without end
CONSTRUCTOR_ERRORS = (  # what constructors say of values that they cannot take
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
)


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """Describe a model family.

    pipeline_class: `_class_name` in model_index.json.
    transformer_class: `_class_name` in the trained component's config.json.
    rollout_pipeline, adapter: dotted names, imported where used.
    components: the pipeline's folders. weighted: those of them that hold safetensors.
    config_files: JSON files without which the model would run with other settings than its own.
    optional: more folders, weighted and with a config.json, that some models of the family have;
    model_index.json says which.
    """

    name: str
    pipeline_class: str
    transformer_class: str
    rollout_pipeline: str
    adapter: str
    components: tuple[str, ...] = ("scheduler", "tokenizer", "text_encoder", "transformer", "vae")
    weighted: tuple[str, ...] = ("text_encoder", "transformer", "vae")
    config_files: tuple[str, ...] = (
        "scheduler/scheduler_config.json",
        "tokenizer/tokenizer_config.json",
        "text_encoder/config.json",
        "transformer/config.json",
        "vae/config.json",
    )
    optional: tuple[str, ...] = ()


FAMILIES = (
    ModelFamily(
        name="qwen_image",
        pipeline_class="QwenImagePipeline",
        transformer_class="QwenImageTransformer2DModel",
        rollout_pipeline="megadiff.models.qwen_image.pipeline.QwenImageRolloutPipeline",
        adapter="megadiff.models.qwen_image.adapter.QwenImageAdapter",
    ),
    ModelFamily(
        name="wan22",
        pipeline_class="WanPipeline",
        transformer_class="WanTransformer3DModel",
        rollout_pipeline="megadiff.models.wan22.pipeline.WanRolloutPipeline",
        adapter="megadiff.models.wan22.adapter.WanAdapter",
        optional=("transformer_2",),
    ),
)


@dataclass(frozen=True, kw_only=True)
class ComponentModel:
    """Describe a trained component by its config.json.

    shapes: of all its parameters, in the module's order.
    """

    shapes: dict[str, tuple[int, ...]]
    plan: ParallelPlan
    num_heads: int


def check_model_folder(folder: Path) -> ModelFamily:
    """Return the family of a diffusers pipeline folder.

    Reads headers only: seconds at most, before any engine starts. Raises ValueError that names
    what is missing, unknown or cut short.
    """
    family = _family(folder)
    index = read_json(folder / "model_index.json")
    optional = tuple(name for name in family.optional if _has_component(index, name))
    absent = [name for name in family.components + optional if not (folder / name).is_dir()]
    if absent:
        folders = ", ".join(f"{name}/" for name in absent)
        raise ValueError(f"{folder} lacks {folders}; fetch the whole model folder")
    for name in (*family.config_files, *(f"{component}/config.json" for component in optional)):
        read_json(folder / name)
    for component in family.weighted + optional:
        for path in weight_files(folder / component):
            open_weights(path)
    return family


def _has_component(index: Mapping[str, object], name: str) -> bool:
    """Tell whether model_index.json has a class for the component: [null, null] means none."""
    classes = index.get(name)
    return isinstance(classes, list) and bool(classes) and classes[0] is not None


def _family(folder: Path) -> ModelFamily:
    if not folder.is_dir():
        raise ValueError(f"model folder {folder} does not exist; give a diffusers pipeline folder")
    class_name = read_json(folder / "model_index.json").get("_class_name")
    by_class = {family.pipeline_class: family for family in FAMILIES}
    if str(class_name) not in by_class:
        raise ValueError(
            f"{folder} is a {class_name!r}; supported pipelines: {', '.join(sorted(by_class))}"
        )
    return by_class[str(class_name)]


def build_adapter(folder: Path) -> ModelAdapter:
    """Return the trainer's adapter of the folder's model family.

    Raises ValueError as `check_model_folder` does.
    """
    family = _family(folder)
    for name in (TRANSFORMER, *family.optional):
        component = folder / name
        if name == TRANSFORMER or component.is_dir():
            _check_transformer_config(component, read_json(component / "config.json"), (family,))
    return _adapter_class(family)(folder)


def component_model(folder: Path) -> ComponentModel:
    """Return the model of a trained component's folder, with a pipeline around it or without.

    Raises ValueError for another kind of model.
    """
    config = read_json(folder / "config.json")
    _check_transformer_config(folder, config, FAMILIES)
    by_class = {family.transformer_class: family for family in FAMILIES}
    name = str(config["_class_name"])
    diffusers = importlib.import_module("diffusers")
    from accelerate import init_empty_weights

    try:
        with init_empty_weights():
            transformer = getattr(diffusers, name).from_config(config)
    except CONSTRUCTOR_ERRORS as error:
        raise ValueError(
            f"{folder}/config.json makes no {name}: {error!r}; fetch it again"
        ) from error
    return ComponentModel(
        shapes={name: tuple(parameter.shape) for name, parameter in transformer.named_parameters()},
        plan=_adapter_class(by_class[name]).plan,
        num_heads=transformer.config.num_attention_heads,
    )


def _check_transformer_config(
    folder: Path, config: Mapping[str, object], families: Sequence[ModelFamily]
) -> None:
    """Raise ValueError for the config of another class, or with sizes that are none."""
    classes = sorted(family.transformer_class for family in families)
    class_name = config.get("_class_name")
    if class_name not in classes:
        raise ValueError(
            f"{folder} is a {class_name!r}; supported components: {', '.join(classes)}"
        )
    for key in SIZES:
        size = config.get(key)
        if type(size) is not int or not 0 < size <= LARGEST_SIZE:
            raise ValueError(
                f"{folder}/config.json has {key}={size!r}, not a whole number from 1 to "
                f"{LARGEST_SIZE}; fetch it again"
            )


def _adapter_class(family: ModelFamily) -> Any:
    module, _, name = family.adapter.rpartition(".")
    return getattr(importlib.import_module(module), name)
