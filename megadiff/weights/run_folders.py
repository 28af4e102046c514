"""What lies beside a checkpoint's weights: where the run stood, its config, and which checkpoint of a run is meant.

runs/<name>/checkpoints/step_000010/{rank_00000.safetensors, …, progress.json, config.yaml}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import yaml

from megadiff import __version__
from megadiff.types import Progress

PROGRESS, CONFIG = "progress.json", "config.yaml"


def step_name(step: int) -> str:
    """Folder name of a step, sorting by step."""
    return f"step_{step:06d}"


def whole_looking(folder: Path) -> list[Path]:
    """Checkpoint folders that were renamed into place, oldest first."""
    return sorted(path for path in folder.glob("step_*") if path.is_dir())


def is_checkpoint(folder: Path) -> bool:
    return (folder / PROGRESS).is_file()


def chosen_checkpoint(run: Path, *, step: int | None) -> Path:
    """A run's checkpoint of a step; its newest for None. Raises ValueError that names those there are."""
    found = whole_looking(run / "checkpoints")
    if not found:
        raise ValueError(f"{run}/checkpoints holds no checkpoint (step_…)")
    if step is None:
        return found[-1]
    chosen = run / "checkpoints" / step_name(step)
    if chosen not in found:
        raise ValueError(f"{run} has no checkpoint of step {step}, but {', '.join(path.name for path in found)}")
    return chosen


def progress_record(folder: Path, progress: Progress) -> str:
    """The text of progress.json: where the run stood, and the sizes of the files that are there by now."""
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
    return json.dumps({**asdict(progress), "megadiff": __version__, "sizes": sizes}, indent=1)


def read_progress(folder: Path) -> Progress:
    """Raises ValueError when a file is missing or has another size than was written. (The bits are checked on reading.)"""
    record = folder / PROGRESS
    if not record.is_file():
        raise ValueError(f"{record} is missing")
    try:
        saved = json.loads(record.read_text(encoding="utf-8"))
        progress = Progress(
            step=saved["step"],
            prompts=saved["prompts"],
            recomputes=saved.get("recomputes", False),
            skipped=saved.get("skipped", 0),
        )
        sizes = dict(saved["sizes"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{record} is corrupt: {error!r}") from error
    for name, size in sizes.items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            raise ValueError(f"{path} {'is missing' if found is None else f'has {found} bytes'}, {size} were written")
    return progress


def read_config(checkpoint: Path) -> dict:
    """The config of the run that wrote the checkpoint, as plain dicts. Raises ValueError when there is none."""
    path = checkpoint / CONFIG
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read ({error})") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds a {type(config).__name__}, not a mapping of config keys")
    return config


def model_path(checkpoint: Path) -> Path:
    """model.path of the run that wrote the checkpoint. Raises ValueError when its config.yaml does not say, or it is gone."""
    try:
        path = Path(read_config(checkpoint)["model"]["path"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{checkpoint / CONFIG} names no model.path ({error}); name the model folder with --base"
        ) from error
    if not path.is_dir():
        raise ValueError(f"{checkpoint} was trained from {path}, which is not there; name the model folder with --base")
    return path


def merged_config(config: Mapping[str, object], changes: Mapping[str, Mapping[str, object]]) -> dict[str, object]:
    """A config with some keys of some sections changed."""
    merged = dict(config)
    for section, values in changes.items():
        held = merged.get(section)
        merged[section] = {**(held if isinstance(held, dict) else {}), **values}
    return merged
