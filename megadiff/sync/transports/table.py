"""The one table of transports: sender, replica and the check of sync.transport read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megadiff.sync.transports import disk, shared_memory
from megadiff.sync.transports.base import HttpTransport, Transport
from megadiff.sync.transports.cuda_ipc import CudaIpcTransport
from megadiff.sync.transports.disk import DiskTransport
from megadiff.sync.transports.group import GroupTransport
from megadiff.sync.transports.shared_memory import SharedMemoryTransport


@dataclass(frozen=True, kw_only=True)
class TransportRow:
    """Describe a transport.

    option: the value of sync.transport that leads to it. sender: the trainer's end.
    is_described: a bucket's request describes tensors that the worker reads elsewhere.
    locate: finds a bucket's file from its name and the replica's --weights, where it is a file.
    """

    option: str
    sender: type[Transport]
    is_described: bool = False
    locate: Callable[[object, Path | None], Path] | None = None


# By the name that a push has on the wire. sync.transport=shm is GPU memory where ranks and
# replicas share GPUs, else host memory.
TRANSPORTS = {
    "http": TransportRow(option="http", sender=HttpTransport),
    "shm": TransportRow(
        option="shm",
        sender=SharedMemoryTransport,
        locate=lambda name, _: shared_memory.locate(name),
    ),
    "cuda_ipc": TransportRow(option="shm", sender=CudaIpcTransport, is_described=True),
    "nccl": TransportRow(option="nccl", sender=GroupTransport, is_described=True),
    "disk": TransportRow(option="disk", sender=DiskTransport, locate=disk.locate),
}
OPTIONS = tuple(dict.fromkeys(row.option for row in TRANSPORTS.values()))
