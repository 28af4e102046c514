"""The model families, and the check that a folder holds a whole model of one of them."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path

from megadiff.models.adapter import ModelAdapter
from megadiff.models.files import open_weights, read_json, weight_files


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """pipeline_class: `_class_name` in model_index.json. rollout_pipeline, adapter: dotted names, imported where used.

    components: the pipeline's folders. weighted: those of them that hold safetensors. config_files: JSON files without
    which the model would run with other settings than its own.
    """

    name: str
    pipeline_class: str
    rollout_pipeline: str
    adapter: str
    components: tuple[str, ...]
    weighted: tuple[str, ...]
    config_files: tuple[str, ...]


FAMILIES = (
    ModelFamily(
        name="qwen_image",
        pipeline_class="QwenImagePipeline",
        rollout_pipeline="megadiff.models.qwen_image.rollout.QwenImageRolloutPipeline",
        adapter="megadiff.models.qwen_image.adapter.QwenImageAdapter",
        components=("scheduler", "tokenizer", "text_encoder", "transformer", "vae"),
        weighted=("text_encoder", "transformer", "vae"),
        config_files=(
            "scheduler/scheduler_config.json",
            "tokenizer/tokenizer_config.json",
            "text_encoder/config.json",
            "transformer/config.json",
            "vae/config.json",
        ),
    ),
)


def check_model_folder(folder: Path) -> ModelFamily:
    """The family of a diffusers pipeline folder. Reads headers only: seconds at most, before any engine starts.

    Raises ValueError that names what is missing, unknown or cut short.
    """
    family = _family(folder)
    absent = [name for name in family.components if not (folder / name).is_dir()]
    if absent:
        raise ValueError(f"{folder} lacks {', '.join(f'{name}/' for name in absent)}; fetch the whole model folder")
    for name in family.config_files:
        read_json(folder / name)
    for component in family.weighted:
        for path in weight_files(folder / component):
            open_weights(path)
    return family


def _family(folder: Path) -> ModelFamily:
    if not folder.is_dir():
        raise ValueError(f"model folder {folder} does not exist; give a diffusers pipeline folder")
    class_name = read_json(folder / "model_index.json").get("_class_name")
    by_class = {family.pipeline_class: family for family in FAMILIES}
    if class_name not in by_class:
        raise ValueError(f"{folder} is a {class_name!r}; supported pipelines: {', '.join(sorted(by_class))}")
    return by_class[class_name]


def build_adapter(folder: Path) -> ModelAdapter:
    """The trainer's adapter of the folder's model family. Raises ValueError as `check_model_folder` does."""
    module, _, name = _family(folder).adapter.rpartition(".")
    return getattr(importlib.import_module(module), name)(folder)
