"""Write a tiny random pipeline whole or not at all, from weights of a seed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import diffusers
import torch
from diffusers import SchedulerMixin
from torch import nn
from transformers import BaseImageProcessor, PreTrainedTokenizerBase

from megadiff.types import DTYPES

# Common words of prompts, of one token each. Their order is the vocabulary's.
WORDS = (
    "the image by detailing color shape size texture quantity text spatial relationships of "
    "objects and background red green blue yellow cyan magenta white black orange purple pink "
    "brown grey gray gold violet a an in on with photo picture painting drawing plain square "
    "circle star heart box sign that says wall sky light dark triangle circles squares triangles "
    "stars two three four left right above below"
).split()


def write_folder(
    out: Path,
    class_name: str,
    networks: Mapping[str, nn.Module],
    tokenizer: PreTrainedTokenizerBase,
    scheduler: SchedulerMixin,
    *,
    dtype: str,
    settings: Mapping[str, object] | None = None,
    more_tokenizers: Mapping[str, PreTrainedTokenizerBase] | None = None,
    image_processor: BaseImageProcessor | None = None,
) -> None:
    """Write a diffusers pipeline folder, whole or not at all. The networks are cast in place.

    more_tokenizers: those beside `tokenizer`, by their folders.
    settings: further keys of model_index.json, or other values of its keys.
    image_processor: of models that are given pictures; processor/ holds it and the tokenizer.
    Raises ValueError when `out` holds something already, and for an unknown dtype.
    """
    check_choice("dtype", dtype, DTYPES)
    parts = {**networks, "tokenizer": tokenizer, "scheduler": scheduler, **(more_tokenizers or {})}
    index = {"_class_name": class_name, "_diffusers_version": diffusers.__version__}
    with written_aside(out) as folder:
        for network in networks.values():
            if network.dtype != DTYPES[dtype]:
                network.to(DTYPES[dtype])
        for name, part in parts.items():
            part.save_pretrained(folder / name)
            index[name] = [type(part).__module__.partition(".")[0], type(part).__name__]
        if image_processor is not None:
            image_processor.save_pretrained(folder / "processor")
            tokenizer.save_pretrained(folder / "processor")
        index |= settings or {}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / "model_index.json").write_text(text, encoding="utf-8")


@contextmanager
def written_aside(out: Path) -> Iterator[Path]:
    """Yield a folder that becomes `out` at the end, or is removed after an error."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty folder; remove it or name another one")
    aside = out.parent / f".{out.name}.writing-{os.getpid()}"
    aside.mkdir(parents=True)
    try:
        yield aside
        os.replace(aside, out)  # replaces an empty folder too
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Raise ValueError for a value that is none of the choices."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown; choose one of {sorted(choices)}")


@torch.no_grad()
def keep_variance(network: nn.Module) -> None:
    """Draw each linear layer's weights so that it keeps its input's variance, without a bias."""
    for module in network.modules():
        if isinstance(module, nn.Linear):
            module.weight.normal_(0, module.in_features**-0.5)
            if module.bias is not None:
                module.bias.zero_()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw the body's random weights from `seed`, and leave the caller's generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
