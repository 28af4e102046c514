"""Read a diffusers folder's JSON and safetensors files, with errors that name file and fix."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

# BAGEL's published layout has no folders of components: this file lies in the model's root. Of its
# names, these are the transformer's; the language model's head and last norm are for text alone.
ROOT_FILE = "ema.safetensors"
LANGUAGE_MODEL = "language_model.model."
GENERATION_CORE = ("time_embedder.", "vae2llm.", "llm2vae.", "latent_pos_embed.")
NOT_TRANSFORMER = ("language_model.model.norm.weight",)
ROOT_CONFIGS = ("config.json", "llm_config.json")  # which describe the transformer there
# diffusers' name of a component's weights, and that of transformers for text encoders
STEMS = ("diffusion_pytorch_model", "model")


def parse_json(text: str | bytes) -> Any:
    """Parse JSON. Raise ValueError for what is none, for doubled keys and for endless nesting."""
    try:
        return json.loads(text, object_pairs_hook=_without_doubles)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _without_doubles(pairs: list[tuple[str, object]]) -> dict[str, object]:
    parsed = dict(pairs)
    if len(parsed) < len(pairs):
        # Readers differ in which of the two they take, so that nobody can tell what was meant.
        keys = [key for key, _ in pairs]
        double = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {double!r} comes twice in one object")
    return parsed


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file. Raises ValueError when there is none."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist; fetch the whole model folder")
    try:
        value = parse_json(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}; fetch it again") from error

    if not isinstance(value, dict):
        raise ValueError(
            f"{path} holds a {type(value).__name__}, not a JSON object; fetch it again"
        )
    return value


def weight_files(folder: Path) -> list[Path]:
    """Return one component's safetensors files: a single one, or those that its index lists.

    Only the names that diffusers and transformers load by default count, and not variants
    (`….fp16.safetensors`) beside them. Raises ValueError.
    """
    for stem in STEMS:
        index = folder / f"{stem}.safetensors.index.json"
        single = folder / f"{stem}.safetensors"
        if index.is_file():
            shards = indexed_files(index)
            missing = [name for name in shards if not (folder / name).is_file()]
            if missing:
                raise ValueError(
                    f"{folder} lacks {', '.join(missing)}, which {index.name} lists; fetch the "
                    "whole folder"
                )
            return [folder / name for name in shards]
        if single.is_file():
            return [single]
    root = folder.parent / ROOT_FILE
    # In a pipeline's root a file of that name is somebody else's.
    if root.is_file() and not (folder.parent / "model_index.json").is_file():
        return [root]
    raise ValueError(
        f"{folder} holds neither diffusion_pytorch_model nor model .safetensors; fetch the whole "
        "model folder"
    )


def indexed_files(index: Path) -> list[str]:
    """Return the names of the files that an index lists. Raise ValueError when it is no index."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no 'weight_map' of tensor and file names; fetch it again")

    for tensor, name in weight_map.items():
        # a path would lead out of the folder
        if not isinstance(name, str) or name != Path(name).name:
            raise ValueError(
                f"{index}: {tensor!r} is said to be in {name!r}, which is no name of a file beside "
                "the index; fetch it again"
            )
    return sorted(set(weight_map.values()))


def transformer_keys(keys: Iterable[str]) -> dict[str, str]:
    """Return the transformer's names of weights → their keys, of those in a root's file."""
    return {
        key.removeprefix(LANGUAGE_MODEL): key
        for key in keys
        if key.startswith((LANGUAGE_MODEL, *GENERATION_CORE)) and key not in NOT_TRANSFORMER
    }


class RootWeights:
    """Read the transformer out of a root's file, which holds several networks."""

    def __init__(self, file: safe_open) -> None:
        self._file = file
        self._key_of = transformer_keys(file.keys())

    def keys(self) -> list[str]:
        return list(self._key_of)

    def get_slice(self, name: str) -> Any:
        return self._file.get_slice(self._key_of[name])

    def get_tensor(self, name: str) -> Tensor:
        return self._file.get_tensor(self._key_of[name])


def open_weights(path: Path) -> safe_open | RootWeights:
    """Open a safetensors file. Raises ValueError when its header does not fit its size."""
    try:
        file = safe_open(path, framework="pt")
        return RootWeights(file) if path.name == ROOT_FILE else file
    except (SafetensorError, OSError) as error:
        size = f" ({path.stat().st_size} bytes)" if path.is_file() else ""
        raise ValueError(
            f"{path}{size} is not a whole safetensors file: {error}; fetch it again"
        ) from error
