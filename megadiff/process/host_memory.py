"""Take memory on the host that a GPU copies to at full speed, and tell how much is free."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import torch
from torch import Tensor

CGROUPS = Path("/sys/fs/cgroup")
PROCESS_CGROUPS = Path("/proc/self/cgroup")


def take_host_memory(num_bytes: int, *, for_gpu: bool) -> Tensor:
    """Return uint8 memory of the host, page-locked for a GPU: a copy takes a second and not ten.

    Where the system refuses to lock it, copies are only slower.
    """
    if not for_gpu:
        return torch.empty(num_bytes, dtype=torch.uint8)
    memory, code = lock_host_memory(num_bytes)
    if code:
        # CUDA tells its next kernel of the error, so here is one.
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")
    return memory


def lock_host_memory(num_bytes: int) -> tuple[Tensor, int]:
    """Return uint8 memory and CUDA's error code: 0 where it is page-locked until it is freed."""
    array = np.empty(num_bytes, np.uint8)
    memory = torch.from_numpy(array)
    if not num_bytes:
        return memory, 0
    address = memory.data_ptr()
    # Not by pin_memory: torch rounds its page-locked allocations up to powers of two.
    code = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))
    if not code:
        # Else a GPU would copy to the old pages where the same address comes again.
        weakref.finalize(array, _unlock, address).atexit = False
    return memory, code


def _unlock(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)


def free_bytes() -> int:
    """Return this rank's part of the node's free memory; ranks of a node have equal parts."""
    free = psutil.virtual_memory().available
    for folder in _cgroups():
        with suppress(OSError, ValueError, KeyError):  # no limit there, or "max"
            limit = int((folder / "memory.max").read_text())
            used = int((folder / "memory.current").read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            # cached files count as used, and give way
            cached = int(stat["active_file"]) + int(stat["inactive_file"])
            free = min(free, limit - used + cached)
    return free // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def total_bytes() -> int:
    """Return the memory of the node, or of the container or Slurm job that may use less."""
    total = psutil.virtual_memory().total
    for folder in _cgroups():
        with suppress(OSError, ValueError):
            total = min(total, int((folder / "memory.max").read_text()))
    return total


def _cgroups() -> Sequence[Path]:
    """Return the folders of cgroup v2 whose limits count: this process's, and any above."""
    cgroup = CGROUPS / PROCESS_CGROUPS.read_text().rpartition("::/")[2].strip()
    return (cgroup, *cgroup.parents)
