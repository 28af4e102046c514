"""A checkpoint's weights as a diffusers pipeline folder."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import torch
import yaml
from safetensors import SafetensorError
from safetensors.torch import save_file

from megadiff.models.registry import check_model_folder
from megadiff.types import DTYPES
from megadiff.weights.shards import AVERAGED, TRAINED, Shard, ShardFolder, SourceFolder

logger = logging.getLogger(__name__)
WEIGHTS_NAME = "diffusion_pytorch_model.safetensors"


def newest_checkpoint(folder: Path) -> Path:
    """A run's newest checkpoint, or the folder itself when it is one. Raises ValueError when it is neither."""
    if (folder / "progress.json").is_file():
        return folder
    pointer = folder / "checkpoints" / "latest"
    if not pointer.is_file():
        raise ValueError(
            f"{folder} is neither a checkpoint (no progress.json) nor a run with one (no checkpoints/latest)"
        )
    return pointer.parent / pointer.read_text(encoding="utf-8").strip()


def model_path(checkpoint: Path) -> Path:
    """model.path of the run that wrote the checkpoint. Raises ValueError when its config.yaml does not say, or it is gone."""
    config = checkpoint / "config.yaml"
    try:
        path = Path(yaml.safe_load(config.read_text(encoding="utf-8"))["model"]["path"])
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise ValueError(f"{config} names no model.path ({error}); name the model folder with --base") from error
    if not path.is_dir():
        raise ValueError(f"{checkpoint} was trained from {path}, which is not there; name the model folder with --base")
    return path


def export_pipeline(checkpoint: Path, base: Path, out: Path, *, dtype: str, averaged: bool | None = None) -> None:
    """Write `out`: the pipeline folder `base` with the checkpoint's weights, cast to dtype, in place of its own.

    averaged: take the running average (sft with ema_decay); None takes it where there is one. The folder appears whole or
    not at all. Raises ValueError when out holds something, the checkpoint is torn or not of this model, or out cannot be
    written. One tensor at a time is read, and a component's tensors in `dtype` are held until its file is written.
    """
    base, out = base.resolve(), out.absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty folder; remove it or name another one")
    if base in out.resolve().parents:
        raise ValueError(f"{out} lies in {base}, which is copied into it; name a folder elsewhere")
    check_model_folder(base)
    source = ShardFolder(checkpoint)
    names = _names(source, _kind(source, averaged))
    for component, stored in names.items():
        shapes = {name: source.shapes[path] for name, path in stored.items()}
        of = f"what {checkpoint} was trained from (name that folder with --base)"
        SourceFolder(base / component).check_names(shapes, of=of)
    aside = out.parent / f".{out.name}.writing-{os.getpid()}"
    try:
        shutil.copytree(base, aside, ignore=lambda folder, found: _replaced(Path(folder), found, base, names))
        for component, stored in names.items():
            tensors = {name: _read(source, path).to(DTYPES[dtype]) for name, path in stored.items()}
            save_file(tensors, aside / component / WEIGHTS_NAME, metadata={"format": "pt"})
            logger.info("%s: %d tensors of %s as %s", component, len(tensors), checkpoint, dtype)
        os.replace(aside, out)  # replaces an empty folder too
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{out} could not be written: {error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _kind(source: ShardFolder, averaged: bool | None) -> str:
    has_average = any(name.startswith(f"{AVERAGED}/") for name in source.shapes)
    if averaged and not has_average:
        raise ValueError(f"{source.folder} holds no averaged weights; it was trained with algorithm.ema_decay=0")
    return AVERAGED if has_average and averaged is not False else TRAINED


def _names(source: ShardFolder, kind: str) -> dict[str, dict[str, str]]:
    """Component → diffusers name → name in the checkpoint, sorted."""
    names: dict[str, dict[str, str]] = {}
    for path in sorted(source.shapes):
        if path.startswith(f"{kind}/"):
            component, _, name = path.removeprefix(f"{kind}/").partition(".")
            names.setdefault(component, {})[name] = path
    return names


def _replaced(folder: Path, found: list[str], base: Path, components: dict[str, dict[str, str]]) -> list[str]:
    """What copytree leaves out: the weight files of the components that are written anew."""
    if folder.parent != base or folder.name not in components:
        return []
    return [name for name in found if name.endswith((".safetensors", ".safetensors.index.json"))]


def _read(source: ShardFolder, name: str) -> torch.Tensor:
    shape = source.shapes[name]
    shard = Shard(local=torch.empty(shape), offsets=(0,) * len(shape), shape=shape)
    source.read_into(name, shard)
    return shard.local
