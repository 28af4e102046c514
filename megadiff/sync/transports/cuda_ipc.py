"""Transport `shm` on a GPU: the sender keeps a bucket in GPU memory, and the replica opens it.

The rank that shares its GPU with a replica sends to it: a replica sees its own GPU only. The bucket
is laid end to end, so that a push opens one handle and not one for each tensor. Tested with torch
2.11.
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
from megadiff.sync.transports.base import PushTarget, Transport

# What UntypedStorage._share_cuda_() returns and _new_shared_cuda() takes, in their order.
_FIELDS = ("device", "handle", "size", "offset", "counter", "counter_offset", "event", "event_sync")


class CudaIpcTransport(Transport):
    """Keep memory for a bucket for as long as a push.

    device: this rank's GPU, on which its targets run.
    """

    name = "cuda_ipc"

    def __init__(self, targets: Sequence[PushTarget], *, device: torch.device) -> None:
        super().__init__(targets)
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._flat: Tensor | None = None
        # A handle for each target: torch counts one receiver for each.
        self._handles: dict[str, dict[str, Any]] = {}

    def send(self, bucket: Bucket) -> None:
        # The current device is a thread's own, and this is not the main thread.
        torch.cuda.set_device(self.device)

        manifest = bucket_manifest(bucket)
        flat = self._reserve(flat_bytes(manifest))
        # The default stream gathered the bucket.
        self._stream.wait_stream(torch.cuda.default_stream(self.device))
        with torch.cuda.stream(self._stream):
            write_flat(bucket, flat)
        # The replica's streams know nothing of this one.
        self._stream.synchronize()

        source = {"transport": self.name, "tensors": manifest}

        def request(target: PushTarget) -> None:
            target.weights_bucket(source | {"handle": self._handles[target.name]})

        self.wait(self.start(request))

    def end(self, error: BaseException | None) -> None:
        if self._flat is not None:
            self._flat = None
            self._handles = {}
            torch.cuda.ipc_collect()  # frees what receivers have let go

    def _reserve(self, num_bytes: int) -> Tensor:
        if self._flat is None or self._flat.numel() < num_bytes:
            # Containers withhold the right to open the memory of growing segments.
            with fixed_segments():
                self._flat = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
            self._handles = {target.name: new_handle(self._flat) for target in self.targets}
        return self._flat


def new_handle(flat: Tensor) -> dict[str, Any]:
    """Return as JSON what another process needs to open the tensor's memory."""
    values = flat.untyped_storage()._share_cuda_()
    named = dict(zip(_FIELDS, values, strict=True))
    return {
        key: base64.b64encode(value).decode() if isinstance(value, bytes) else value
        for key, value in named.items()
    }


class OpenedMemory:
    """Keep the memory that a replica's worker has opened, of one handle at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._key = ""
        self._flat = torch.empty(0)

    def open(self, handle: Mapping[str, Any]) -> Tensor:
        """Return the memory, [bytes] uint8. Raises ValueError for what is no handle."""
        key = json.dumps(handle, sort_keys=True)
        if key != self._key:
            self.close()
            self._flat = _open(handle, self.device)
            self._key = key
        return self._flat

    def close(self) -> None:
        self._key = ""
        self._flat = torch.empty(0)


def _open(handle: Mapping[str, Any], device: torch.device) -> Tensor:
    if device.type != "cuda":
        raise ValueError(
            f"a bucket in GPU memory for a replica on {device.type}; set sync.transport=http"
        )
    if not isinstance(handle, dict) or handle.keys() != set(_FIELDS):
        raise ValueError(f"the handle of GPU memory must have the keys {', '.join(_FIELDS)}")

    values: dict[str, Any] = {
        key: base64.b64decode(value) if isinstance(value, str) else value
        for key, value in handle.items()
    }

    # The same GPU has another number in a process that does not see the others.
    values["device"] = device.index or 0
    torch.cuda.set_device(device)
    storage = torch.UntypedStorage._new_shared_cuda(*(values[key] for key in _FIELDS))
    return torch.empty(0, dtype=torch.uint8, device=device).set_(
        storage, 0, (values["size"],), (1,)
    )
