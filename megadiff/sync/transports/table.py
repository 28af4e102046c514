"""The one table of transports: sender, replica and the check of sync.transport read it."""

from __future__ import annotations

from typing import NamedTuple


class TransportRow(NamedTuple):
    """Describe a transport.

    option: the value of sync.transport that leads to it. bucket: where a bucket is: the body of its
    request, a file that the request names, or memory that it describes.
    """

    option: str
    bucket: str


# By the name that a push has on the wire. sync.transport=shm is GPU memory where ranks and
# replicas share GPUs, else host memory.
TRANSPORTS = {
    "http": TransportRow("http", "body"),
    "shm": TransportRow("shm", "file"),
    "cuda_ipc": TransportRow("shm", "memory"),
    "nccl": TransportRow("nccl", "memory"),
    "disk": TransportRow("disk", "file"),
}
OPTIONS = tuple(dict.fromkeys(row.option for row in TRANSPORTS.values()))
