"""Memory of GPUs that is held, so that a run finds no more than a smaller GPU has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megadiff.observe.device_memory import GIB
from megadiff.process.words import counted


@contextmanager
def hold_all_but(gib: float, *, num_gpus: int) -> Iterator[float]:
    """Leave `gib` of each of the first GPUs free; give the GiB that are taken of the fullest.

    A run that fits beside it fits a GPU of that size: its contexts, allocators and libraries all
    count, and those of this process do not. What a run decides by its GPU's size it decides by the
    larger one's. Raises ValueError where a GPU has less than that free.
    """
    if torch.cuda.device_count() < num_gpus:
        raise ValueError(
            f"--hold needs {counted(num_gpus, 'GPU')}, found {torch.cuda.device_count()}; give "
            "--gpus as many, or leave --hold out"
        )
    held = [_hold(index, gib) for index in range(num_gpus)]
    infos = [torch.cuda.mem_get_info(index) for index in range(num_gpus)]
    try:
        yield max(total - free for free, total in infos) / GIB
    finally:
        held.clear()
        torch.cuda.empty_cache()


def _hold(index: int, gib: float) -> Tensor:
    torch.zeros(1, device=f"cuda:{index}")  # this process's context is there from now on
    free, total = torch.cuda.mem_get_info(index)
    num_bytes = free - int(gib * GIB)
    if num_bytes <= 0:
        raise ValueError(
            f"--hold leaves {gib:g} GiB free, but GPU {index} has {free / GIB:.1f} of "
            f"{total / GIB:.1f} GiB free; name a smaller one by --gpu, or leave --hold out"
        )
    return torch.empty(num_bytes, dtype=torch.uint8, device=f"cuda:{index}")
