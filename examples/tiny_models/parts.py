"""Write a tiny random pipeline whole or not at all, from weights of a seed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

# Common words of prompts, of one token each. Their order is the vocabulary's.
WORDS = (
    "the image by detailing color shape size texture quantity text spatial relationships of "
    "objects and background red green blue yellow cyan magenta white black orange purple pink "
    "brown grey gray gold violet a an in on with photo picture painting drawing plain square "
    "circle star heart box sign that says wall sky light dark triangle circles squares triangles "
    "stars two three four left right above below"
).split()


@contextmanager
def written_aside(out: Path) -> Iterator[Path]:
    """Give a folder beside `out` to write into, renamed to `out` at the end.

    It is removed when the body raises. Raises ValueError when `out` holds something already.
    """
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


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw the body's random weights from `seed`, and leave the caller's generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
