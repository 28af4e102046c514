"""List the model families, and check that a folder holds a whole model of one of them."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megadiff.models.adapter import ModelAdapter
from megadiff.parallel.plan import ParallelPlan
from megadiff.tensors.model_files import open_weights, read_json, weight_files
from megadiff.types import Shape

TRANSFORMER = "transformer"  # a component that all pipelines have
WEIGHTED = ("text_encoder", TRANSFORMER, "vae")  # of all pipelines, in safetensors
# JSON files without which the model would run with other settings than its own
SETTINGS = ("scheduler/scheduler_config.json", "tokenizer/tokenizer_config.json")
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
    optional: weighted components that some models of the family have.
    """

    pipeline_class: str
    transformer_class: str
    rollout_pipeline: str
    adapter: str
    optional: tuple[str, ...] = ()

    def weighted(self, index: Mapping[str, object]) -> tuple[str, ...]:
        """Return the components of weights that a model has, by its model_index.json."""
        components: tuple[str, ...] = WEIGHTED
        for name in self.optional:
            classes = index.get(name)
            # [null, null] means none
            if isinstance(classes, list) and classes and classes[0] is not None:
                components += (name,)
        return components


FAMILIES = (
    ModelFamily(
        pipeline_class="QwenImagePipeline",
        transformer_class="QwenImageTransformer2DModel",
        rollout_pipeline="megadiff.models.qwen_image.pipeline.QwenImageRolloutPipeline",
        adapter="megadiff.models.qwen_image.adapter.QwenImageAdapter",
    ),
    ModelFamily(
        pipeline_class="WanPipeline",
        transformer_class="WanTransformer3DModel",
        rollout_pipeline="megadiff.models.wan22.pipeline.WanRolloutPipeline",
        adapter="megadiff.models.wan22.adapter.WanAdapter",
        optional=("transformer_2",),
    ),
    ModelFamily(
        pipeline_class="StableDiffusion3Pipeline",
        transformer_class="SD3Transformer2DModel",
        rollout_pipeline="megadiff.models.sd3.pipeline.SD3RolloutPipeline",
        adapter="megadiff.models.sd3.adapter.SD3Adapter",
    ),
)


@dataclass(frozen=True, kw_only=True)
class ComponentModel:
    """Describe a trained component by its config.json.

    shapes: of all its parameters, in the module's order.
    """

    shapes: dict[str, Shape]
    plan: ParallelPlan
    num_heads: int


def check_model_folder(folder: Path) -> ModelFamily:
    """Return the family of a diffusers pipeline folder.

    Reads headers only: seconds at most, before any engine starts. Raises ValueError that names
    what is missing, unknown or cut short.
    """
    family = family_of(folder)
    weighted = family.weighted(read_json(folder / "model_index.json"))
    components = ("scheduler", "tokenizer", *weighted)

    absent = [name for name in components if not (folder / name).is_dir()]
    if absent:
        folders = ", ".join(f"{name}/" for name in absent)
        raise ValueError(f"{folder} lacks {folders}; fetch the whole model folder")

    for name in (*SETTINGS, *(f"{component}/config.json" for component in weighted)):
        read_json(folder / name)

    # opening reads a file's header, and compares it with the file's size
    for component in weighted:
        for path in weight_files(folder / component):
            open_weights(path)
    return family


def family_of(folder: Path) -> ModelFamily:
    """Return the family that model_index.json names. Raises ValueError for another."""
    if not folder.is_dir():
        raise ValueError(f"model folder {folder} does not exist; give a diffusers pipeline folder")
    class_name = read_json(folder / "model_index.json").get("_class_name")
    for family in FAMILIES:
        if family.pipeline_class == class_name:
            return family
    supported = ", ".join(sorted(family.pipeline_class for family in FAMILIES))
    raise ValueError(f"{folder} is a {class_name!r}; supported pipelines: {supported}")


def build_adapter(folder: Path) -> ModelAdapter:
    """Return the trainer's adapter of the folder's model family.

    Raises ValueError as `check_model_folder` does.
    """
    family = family_of(folder)
    for name in (TRANSFORMER, *family.optional):
        component = folder / name
        if name == TRANSFORMER or component.is_dir():
            _check_transformer_config(component, read_json(component / "config.json"), (family,))
    return pkgutil.resolve_name(family.adapter)(folder)


def component_model(folder: Path) -> ComponentModel:
    """Return the model of a trained component's folder, with a pipeline around it or without.

    Raises ValueError for another kind of model.
    """
    config = read_json(folder / "config.json")
    _check_transformer_config(folder, config, FAMILIES)
    by_class = {family.transformer_class: family for family in FAMILIES}
    name = str(config["_class_name"])

    import diffusers
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
        plan=pkgutil.resolve_name(by_class[name].adapter).plan,
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
        # type(): isinstance takes JSON's true for 1
        if type(size) is not int or not 0 < size <= LARGEST_SIZE:
            raise ValueError(
                f"{folder}/config.json has {key}={size!r}, not a whole number from 1 to "
                f"{LARGEST_SIZE}; fetch it again"
            )
