"""A checkpoint's weights as a diffusers pipeline folder."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import torch
import yaml
from safetensors.torch import save_file

from megadiff.models.files import open_weights, weight_files
from megadiff.types import DTYPES
from megadiff.weights.shards import Shard, ShardFolder

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


def export_pipeline(checkpoint: Path, base: Path, out: Path, *, dtype: str, averaged: bool | None = None) -> None:
    """Write `out`: the pipeline folder `base` with the checkpoint's weights, cast to dtype, in place of its own.

    averaged: take the running average (sft with ema_decay); None takes it where there is one. The folder appears whole or
    not at all. Raises ValueError when out holds something, or the checkpoint is not of this model. One tensor at a time
    is read, and a component's tensors in `dtype` are held until its file is written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty folder; remove it or name another one")
    source = ShardFolder(checkpoint)
    kind = _kind(source, averaged)
    names = [name.removeprefix(f"{kind}/") for name in source.shapes if name.startswith(f"{kind}/")]
    components = sorted({name.partition(".")[0] for name in names})
    aside = out.parent / f".{out.name}.writing-{os.getpid()}"
    try:
        shutil.copytree(base, aside, ignore=lambda folder, found: _replaced(Path(folder), found, base, components))
        for component in components:
            tensors = {
                name.partition(".")[2]: _read(source, f"{kind}/{name}").to(DTYPES[dtype])
                for name in sorted(names)
                if name.partition(".")[0] == component
            }
            _check_names(tensors, base / component)
            save_file(tensors, aside / component / WEIGHTS_NAME, metadata={"format": "pt"})
            logger.info("%s: %d tensors of %s as %s", component, len(tensors), checkpoint, dtype)
        os.replace(aside, out)  # replaces an empty folder too
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _kind(source: ShardFolder, averaged: bool | None) -> str:
    has_average = any(name.startswith("average/") for name in source.shapes)
    if averaged and not has_average:
        raise ValueError(f"{source.folder} holds no averaged weights; it was trained with algorithm.ema_decay=0")
    return "average" if has_average and averaged is not False else "model"


def _replaced(folder: Path, found: list[str], base: Path, components: list[str]) -> list[str]:
    """What copytree leaves out: the weight files of the components that are written anew."""
    if folder.parent != base or folder.name not in components:
        return []
    return [name for name in found if name.endswith((".safetensors", ".safetensors.index.json"))]


def _read(source: ShardFolder, name: str) -> torch.Tensor:
    shape = source.shapes[name]
    shard = Shard(local=torch.empty(shape), offsets=(0,) * len(shape), shape=shape)
    source.read_into(name, shard)
    return shard.local


def _check_names(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    expected: dict[str, list[int]] = {}
    for path in weight_files(folder):
        file = open_weights(path)
        expected |= {name: file.get_slice(name).get_shape() for name in file.keys()}
    found = {name: list(tensor.shape) for name, tensor in tensors.items()}
    if found != expected:
        wrong = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
        raise ValueError(
            f"the checkpoint's {len(found)} tensors are not the {len(expected)} of {folder}: {', '.join(wrong[:5])}; "
            "give the model folder that the run was trained from"
        )


def model_path(checkpoint: Path) -> Path:
    """model.path of the run that wrote the checkpoint. Raises ValueError when its config.yaml is gone."""
    config = checkpoint / "config.yaml"
    if not config.is_file():
        raise ValueError(f"{config} is missing; name the model folder with --base")
    return Path(yaml.safe_load(config.read_text(encoding="utf-8"))["model"]["path"])
