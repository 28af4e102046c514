"""Where a process runs, and which parts of the weights a replica's worker has."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from megadiff.weights.lora_names import Box


def host_name() -> str:
    """The same for two processes that run on one machine, and share its memory unless containers part them."""
    return f"{socket.gethostname()}/{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"


def process_home() -> str:
    """Return the same for two processes that see each other's pids; containers may part them."""
    return f"{host_name()}/{os.readlink('/proc/self/ns/pid')}"


def device_name(device: torch.device) -> str:
    """cpu, or the GPU's own name in the world, which is the same in processes that number GPUs differently."""
    return "cpu" if device.type == "cpu" else f"cuda:{torch.cuda.get_device_properties(device).uuid}"


def worker_boxes(
    shapes: Mapping[str, Sequence[int]], views: Mapping[str, Sequence[int]], *, rank: int, size: int
) -> dict[str, Box]:
    """name → the part of the full tensor that worker `rank` of `size` has, of tensors that it does not have whole.

    shapes: of the full tensors, views: of what this worker has of them. Raises ValueError when that is no equal part.
    """
    boxes: dict[str, Box] = {}
    for name, view in views.items():
        full = shapes[name]
        cut = [axis for axis in range(len(full)) if full[axis] != view[axis]] if len(view) == len(full) else None
        if cut == []:
            continue
        if cut is None or len(cut) > 1 or view[cut[0]] * size != full[cut[0]]:
            raise ValueError(
                f"{name} is {list(view)} on worker {rank} of {size}, which is no equal part of {list(full)}"
            )
        begin = rank * view[cut[0]]
        part = (begin, begin + view[cut[0]])
        boxes[name] = tuple(part if axis == cut[0] else (0, length) for axis, length in enumerate(full))
    return boxes


def boxes_from_json(value: Mapping[str, Sequence[Sequence[int]]]) -> dict[str, Box]:
    """worker_boxes' value after a way through JSON, which has lists for tuples."""
    return {name: tuple((begin, end) for begin, end in box) for name, box in value.items()}
