"""One transport thread for all gloo groups of a process.

torch starts one for each group, and each wakes up a hundred times a second. vllm-omni makes 17
groups for one worker, and a trainer's rank has a dozen. On two CPU cores that was felt.
"""

from __future__ import annotations

import os
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

INTERFACES = "GLOO_SOCKET_IFNAME"
# Users choose another transport by these, which torch then reads for each group.
CHOICES = ("GLOO_DEVICE_TRANSPORT", "TORCH_GLOO_LAZY_INIT")
THREADS = 2  # torch's own number, of a device in a group


class SharedGloo(dist.ProcessGroupGloo):
    """Use devices that other gloo groups use too, in place of a group's own."""

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta | None = None
    ) -> None:
        gloo: Any = dist.ProcessGroupGloo  # whose types do not say what it takes
        options = gloo._Options()
        if timeout is not None:
            options._timeout = timeout
        options._devices = _devices(os.getpid(), os.environ.get(INTERFACES, ""))
        options._threads = THREADS * len(options._devices)
        super().__init__(store, rank, size, options)


@cache
def _devices(pid: int, interfaces: str) -> list[Any]:
    """Return a device for each interface, or for the host's name; `pid` has their threads."""
    gloo: Any = dist.ProcessGroupGloo
    if not interfaces:
        return [gloo.create_default_device()]
    return [gloo.create_device(interface=name) for name in interfaces.split(",")]


def share_devices() -> None:
    """Let gloo groups that are made from now on share threads. A second call does nothing."""
    if not any(name in os.environ for name in CHOICES):
        c10d.ProcessGroupGloo = SharedGloo  # type: ignore[misc]
