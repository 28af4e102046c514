"""End a request that nobody waits for: by a file that workers look for before each forward pass.

vllm-omni cannot end a request that runs: 0.28 forgets it while the engine goes on, 0.26 never
answers the call that should end it.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

STOP_KEY = "megadiff_stop"  # in a request's extra_args: the file's path
ALIVE_NAME = "alive"  # of the file beside it whose time is that of the engine's last progress


class Stopped(ValueError):
    """Tell that the request was given up; the engine is well."""


def stop_path(batch: Any) -> str | None:
    """Return the path by which a vllm-omni request batch is ended, None where it has none."""
    paths = [params.extra_args.get(STOP_KEY) for params in batch.sampling_params_list]
    return paths[0] if len(paths) == 1 and isinstance(paths[0], str) else None


def check_stop(path: str | None, group: dist.ProcessGroup) -> None:
    """Raise Stopped once the file is there, on every worker before the same forward pass.

    The first worker looks, and tells the others: one that went on alone would wait for ever in a
    collective. group: of the workers, on the CPU.
    """
    if path is None:
        return

    _show_progress(path)
    is_stopped = torch.tensor([int(os.path.exists(path))])
    if dist.get_world_size(group) > 1:
        dist.broadcast(is_stopped, group_src=0, group=group)
    if is_stopped.item():
        raise Stopped("the request was given up: its client left, or its time was over")


def _show_progress(path: str) -> None:
    """Tell the server that the engine goes on; a stuck GPU touches no file."""
    with suppress(OSError):  # a full disk is told of elsewhere
        Path(path).with_name(ALIVE_NAME).touch()
