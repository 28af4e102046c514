"""Derive from model_index.json which files a pipeline folder must hold, and look for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megadiff.tensors.model_files import open_weights, read_json, weight_files

INDEX = "model_index.json"
LARGEST_SIZE = 1 << 16  # a module with 10**9 layers would be built without end
REQUIRED = ("scheduler", "tokenizer", "text_encoder", "transformer", "vae")  # of all pipelines
LIBRARIES = ("diffusers", "transformers")  # whose components a folder can be checked for
# word in the name of a class without weights → its settings file, or what newer versions call it;
# without them a model would run with other settings than its own
SETTINGS = {
    "Scheduler": ("scheduler_config.json",),
    "Tokenizer": ("tokenizer_config.json",),
    "Processor": ("preprocessor_config.json", "processor_config.json"),
    "FeatureExtractor": ("preprocessor_config.json",),
}

ClassPath = tuple[str, str]  # library, class
Index = Mapping[str, object]  # of model_index.json; empty for a model that has none


def read_index(folder: Path) -> Index:
    """Read model_index.json. Raises ValueError where it is not JSON."""
    path = folder / INDEX
    return read_json(path) if path.is_file() else {}


def components_of(index: Index) -> dict[str, ClassPath]:
    """Return component → its class, for those of LIBRARIES."""
    components = {}
    for name, value in index.items():
        # settings of the pipeline are no lists, and [null, null] means that there is none
        if isinstance(value, list) and len(value) == 2 and value[0] in LIBRARIES:
            components[name] = (str(value[0]), str(value[1]))
    return components


def settings_of(class_name: str) -> tuple[str, ...]:
    """Return the settings files of a class without weights; empty for a class with weights."""
    for word, files in SETTINGS.items():
        if word in class_name:
            return files
    return ()


def weighted_components(index: Index) -> dict[str, ClassPath]:
    """Return component → its class, for those with weights."""
    return {
        name: class_path
        for name, class_path in components_of(index).items()
        if not settings_of(class_path[1])
    }


def pipeline_problems(folder: Path, index: Index) -> Iterator[str]:
    """Yield what the folder lacks or has damaged, most telling first. Headers alone are read."""
    components = components_of(index)
    unlisted = [name for name in REQUIRED if name not in components]
    if unlisted:
        yield f"{folder / INDEX} lists no {', '.join(unlisted)}; fetch it again"
    absent = [name for name in components if not (folder / name).is_dir()]
    if absent:
        folders = ", ".join(f"{name}/" for name in absent)
        yield f"{folder} lacks {folders}; fetch the whole model folder"

    for name, (_, class_name) in components.items():
        files = settings_of(class_name)
        if name in absent:
            continue
        try:
            if files:
                there = [file for file in files if (folder / name / file).is_file()]
                read_json(folder / name / (there or files)[0])
                continue
            read_json(folder / name / "config.json")
            # opening reads a file's header, and compares it with the file's size
            for path in weight_files(folder / name):
                open_weights(path)
        except ValueError as error:
            yield str(error)


def check_sizes(path: Path, config: Mapping[str, Any], keys: Iterable[str]) -> None:
    """Raise ValueError for a key of a config.json that is no size."""
    for key in keys:
        size = config.get(key)
        # type(): isinstance takes JSON's true for 1
        if type(size) is not int or not 0 < size <= LARGEST_SIZE:
            raise ValueError(
                f"{path} has {key}={size!r}, not a whole number from 1 to {LARGEST_SIZE}; fetch it "
                "again"
            )
