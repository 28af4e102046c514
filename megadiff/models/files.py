"""Reading a diffusers folder: its JSON and its safetensors files, with errors that name the file and the fix."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open


def read_json(path: Path) -> dict[str, object]:
    """The JSON object in a file. Raises ValueError when there is no such file, or something else in it."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist; fetch the whole model folder")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}; fetch it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, not a JSON object; fetch it again")
    return value


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of one component: a single one, or those that its index lists. Raises ValueError.

    Only the names that diffusers and transformers load by default: variants (`….fp16.safetensors`) beside them do not count.
    """
    for stem in ("diffusion_pytorch_model", "model"):
        index, single = folder / f"{stem}.safetensors.index.json", folder / f"{stem}.safetensors"
        if index.is_file():
            shards = sorted(set(read_json(index)["weight_map"].values()))  # type: ignore[attr-defined]
            missing = [name for name in shards if not (folder / name).is_file()]
            if missing:
                raise ValueError(
                    f"{folder} lacks {', '.join(missing)}, which {index.name} lists; fetch the whole folder"
                )
            return [folder / name for name in shards]
        if single.is_file():
            return [single]
    raise ValueError(
        f"{folder} holds neither diffusion_pytorch_model nor model .safetensors; fetch the whole model folder"
    )


def open_weights(path: Path) -> safe_open:
    """An open safetensors file; opening compares the header's offsets with the file's size. Raises ValueError."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        size = f" ({path.stat().st_size} bytes)" if path.is_file() else ""
        raise ValueError(f"{path}{size} is not a whole safetensors file: {error}; fetch it again") from error
