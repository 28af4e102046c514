"""Transport `shm` on a GPU: a bucket lies in GPU memory that the sender keeps, and the replica opens that memory.

The rank that shares its GPU with a replica sends to it: a replica sees its own GPU only. The bucket is laid end to end
into one piece of memory, so that one handle is opened in a push and not one for each tensor. Tested with torch 2.11.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megadiff.process.allocator import fixed_segments
from megadiff.sync.bucket import Bucket, bucket_manifest, flat_bytes, write_flat
from megadiff.sync.transports.base import Transport, WeightTarget

_FIELDS = ("device", "handle", "size", "offset", "counter", "counter_offset", "event", "event_sync")


class CudaIpcTransport(Transport):
    """device: this rank's GPU, on which its targets run. The memory for a bucket lives as long as a push."""

    name = "cuda_ipc"

    def __init__(self, targets: Sequence[WeightTarget], *, device: torch.device) -> None:
        super().__init__(targets)
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._flat: Tensor | None = None
        self._handles: dict[
            str, dict[str, Any]
        ] = {}  # of each target: torch counts the receivers of a handle, one each

    def send(self, bucket: Bucket) -> None:
        torch.cuda.set_device(self.device)  # of this thread
        manifest = bucket_manifest(bucket)
        self._reserve(flat_bytes(manifest))
        self._stream.wait_stream(
            torch.cuda.default_stream(self.device)
        )  # which gathered the bucket
        with torch.cuda.stream(self._stream):
            write_flat(bucket, self._flat)
        self._stream.synchronize()
        source = {"transport": "cuda_ipc", "tensors": manifest}
        self.wait(
            self.start(
                lambda target: target.weights_bucket(
                    source | {"handle": self._handles[target.name]}
                )
            )
        )

    def end(self, error: BaseException | None) -> None:
        if self._flat is not None:
            self._flat, self._handles = None, {}
            torch.cuda.ipc_collect()  # what receivers have let go

    def _reserve(self, num_bytes: int) -> None:
        if self._flat is None or self._flat.numel() < num_bytes:
            with fixed_segments():
                self._flat = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
            self._handles = {target.name: share(self._flat) for target in self.targets}


def share(flat: Tensor) -> dict[str, Any]:
    """What another process needs to open the tensor's memory, as JSON."""
    values = flat.untyped_storage()._share_cuda_()
    named = dict(zip(_FIELDS, values, strict=True))
    return {
        key: base64.b64encode(value).decode() if isinstance(value, bytes) else value
        for key, value in named.items()
    }


class Opened:
    """The memory that a replica's worker has opened: one piece at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._key, self._flat = "", torch.empty(0)

    def open(self, handle: Mapping[str, Any]) -> Tensor:
        """[bytes] uint8. Raises ValueError for what is no handle."""
        key = json.dumps(handle, sort_keys=True)
        if key != self._key:
            self.close()
            self._flat, self._key = _open(handle, self.device), key
        return self._flat

    def close(self) -> None:
        self._key, self._flat = "", torch.empty(0)


def _open(handle: Mapping[str, Any], device: torch.device) -> Tensor:
    if device.type != "cuda":
        raise ValueError(
            f"a bucket in GPU memory for a replica on {device.type}; set sync.transport=http"
        )
    if not isinstance(handle, dict) or handle.keys() != set(_FIELDS):
        raise ValueError(f"the handle of GPU memory must have the keys {', '.join(_FIELDS)}")
    values = {
        key: base64.b64decode(value) if isinstance(value, str) else value
        for key, value in handle.items()
    }
    values["device"] = (
        device.index or 0
    )  # the same GPU has another number where others are not seen
    torch.cuda.set_device(device)
    storage = torch.UntypedStorage._new_shared_cuda(*(values[key] for key in _FIELDS))
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (values["size"],))
