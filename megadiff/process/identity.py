"""Name a process's host, home and device so that other processes can compare them."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it takes seconds, and most who ask need none of it
    import torch


def host_name() -> str:
    """Return the same for two processes that run on one machine.

    They share its memory, unless containers part them.
    """
    # Two machines may have one name, so the boot's id goes with it.
    return f"{socket.gethostname()}/{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"


def process_home() -> str:
    """Return the same for two processes that see each other's pids; containers may part them."""
    return f"{host_name()}/{os.readlink('/proc/self/ns/pid')}"


def device_name(device: torch.device) -> str:
    """Return cpu, or the GPU's uuid: processes may number the same GPUs differently."""
    if device.type == "cpu":
        return "cpu"
    import torch

    return f"cuda:{torch.cuda.get_device_properties(device).uuid}"
