"""The replica's side of all transports: the tensors that a bucket request names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from megadiff.sync.bucket import file_manifest, read_flat
from megadiff.sync.shared_base import MAPPED
from megadiff.sync.transports import cuda_ipc, disk, group, shared_memory
from megadiff.sync.transports.table import TRANSPORTS
from megadiff.tensors.manifest import Manifest
from megadiff.types import DTYPES


def resolve(source: object, *, weights_folder: Path | None) -> tuple[Manifest, dict[str, Any]]:
    """Return a bucket's manifest and what `Receiver.tensors` takes, for a request's JSON body.

    A file is named within a fixed folder, never by a path. Raises ValueError for a wrong body.
    """
    if not isinstance(source, dict):
        raise ValueError(
            f"the bucket's source is a {type(source).__name__}; it must be a JSON object"
        )

    transport = source.get("transport")
    # A tuple: what is asked for may have no hash.
    bucket = TRANSPORTS[transport].bucket if transport in tuple(TRANSPORTS) else "body"

    if bucket == "file":
        name = source.get("file")
        path = (
            shared_memory.locate(name) if transport == "shm" else disk.locate(name, weights_folder)
        )
        return file_manifest(path), {"transport": "file", "path": str(path)}

    if bucket == "memory" or transport == MAPPED:
        manifest: Any = source.get("tensors")
        _check_rows(manifest)
        return manifest, source

    described = [name for name, row in TRANSPORTS.items() if row.bucket != "body"]
    raise ValueError(f"transport={transport!r} of the bucket is none of {', '.join(described)}")


class Receiver:
    """Keep for a worker what outlives a bucket: the trainer's group, opened memory.

    device: of its weights. worker: its number among those of its replica.
    """

    def __init__(self, device: torch.device, *, worker: int) -> None:
        self.device = device
        self._group = group.Member(device, worker=worker)
        self._memory = cuda_ipc.OpenedMemory(device)

    def begin(self, transport: Mapping[str, Any]) -> None:
        """Open a push. Joins the trainer's group where the transport has one."""
        # Of a push that failed: end() comes with a commit only.
        self._memory.close()
        if transport["name"] == "nccl":
            self._group.join(transport)

    def end(self) -> None:
        """Give back at the commit what only one push needs."""
        self._memory.close()

    @contextmanager
    def tensors(self, source: Mapping[str, Any]) -> Iterator[Iterator[tuple[str, Tensor]]]:
        """Yield names and full tensors of a bucket.

        They are the sender's memory: valid within the context, and only to read.
        """
        if source["transport"] == "file":
            # The file is mapped: a reader that narrows a tensor reads no more than its part.
            with safe_open(Path(source["path"]), framework="pt") as file:
                yield ((name, file.get_tensor(name)) for name in file.keys())
            return

        manifest = source["tensors"]
        if source["transport"] == "nccl":
            flat = self._group.receive(source, manifest)
        else:
            flat = self._memory.open(source["handle"])
        yield read_flat(manifest, flat)

        if self.device.type == "cuda":
            # The sender overwrites its memory after the answer. Loaders, in whatever thread, read
            # it on these two streams. Others may go on: they bring weights back from host memory.
            torch.cuda.default_stream(self.device).synchronize()
            torch.cuda.current_stream(self.device).synchronize()


def _check_rows(manifest: object) -> None:
    """Raise ValueError unless it is name → {"dtype", "shape"}, as a manifest has it."""
    rows: Iterable[tuple[str, Any]] = (
        manifest.items() if isinstance(manifest, dict) else [("tensors", None)]
    )

    for name, row in rows:
        good = (
            isinstance(row, dict)
            and row.get("dtype") in DTYPES
            and isinstance(row.get("shape"), list)
        )
        if not good or not all(type(size) is int and size >= 0 for size in row["shape"]):
            raise ValueError(
                f"{name} of the bucket is {row!r:.200}; it must be an object of dtype and shape"
            )
