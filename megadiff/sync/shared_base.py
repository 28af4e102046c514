"""Keep a frozen base once for a trainer rank and the replica on its device: both map one memory.

Weights lie as replicas' modules have them: what a replica packs into one parameter (queries, keys
and values, say) lies end to end. So the replica's parameters are views of the memory, and the
trainer's are row views of those. On a GPU the memory is opened by CUDA IPC. On a CPU it is a file
in shared memory, which a replica maps for itself: what it wrote there would change nothing here.
"""

from __future__ import annotations

import errno
import math
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megadiff.models.served_names import ServedNames, ServedPlace, ServedPlaces, packed_names
from megadiff.process.allocator import fixed_segments
from megadiff.sync.bucket import ALIGNMENT, Bucket, bucket_manifest
from megadiff.sync.transports import cuda_ipc
from megadiff.sync.transports.base import PushTarget, Transport
from megadiff.sync.transports.shared_memory import FOLDER, bucket_file, locate, sweep
from megadiff.tensors.manifest import Manifest
from megadiff.types import DTYPES, JsonObject, Shapes, Tensors

MAPPED = "mapped"  # a bucket's transport, where its tensors are mapped and not read


@dataclass(frozen=True, kw_only=True)
class BaseLayout:
    """Say at which byte each weight of a component starts. num_bytes: of all of them."""

    starts: Mapping[str, int]
    num_bytes: int


def base_layout(shapes: Shapes, itemsize: int, served_names: ServedNames) -> BaseLayout:
    """Lay weights out as a replica of one worker packs them. Each of its parameters is aligned."""
    starts: dict[str, int] = {}
    end = 0
    for names in packed_names(shapes, served_names):
        end = -(-end // ALIGNMENT) * ALIGNMENT
        for name in names:
            starts[name] = end
            end += math.prod(shapes[name]) * itemsize
    return BaseLayout(starts=starts, num_bytes=end)


class SharedBase:
    """Hold a component's frozen weights whole, in memory that replicas can map.

    tensors: name → view of the memory, uninitialised at first. On a CPU close() removes the file; a
    killed process's file goes when the next one starts there.
    """

    def __init__(
        self,
        shapes: Shapes,
        *,
        dtype: torch.dtype,
        served_names: ServedNames,
        device: torch.device,
    ) -> None:
        """Take the memory. Raises ValueError where shared memory has no room for it."""
        layout = base_layout(shapes, dtype.itemsize, served_names)
        self.device = device
        self._file = ""
        self._removal = ExitStack()
        if device.type == "cuda":
            # Containers withhold the right to open the memory of growing segments.
            with fixed_segments():
                self._flat = torch.empty(layout.num_bytes, dtype=torch.uint8, device=device)
        else:
            sweep()  # its own dead process may hold the room that it needs
            path = self._removal.enter_context(bucket_file())
            weakref.finalize(self, self._removal.close)
            self._file = path.name
            self._flat = _new_file(path, layout.num_bytes)
        self.tensors: Tensors = {
            name: _view(self._flat, start, dtype, shapes[name])
            for name, start in layout.starts.items()
        }

    def close(self) -> None:
        """Let nobody map the memory any more; who has it mapped keeps it."""
        self._removal.close()

    def memory(self) -> JsonObject:
        """Return what one replica needs to map the memory, anew for each."""
        if self._file:
            return {"file": self._file, "num_bytes": self._flat.numel()}
        # torch counts one receiver for each handle
        return {"handle": cuda_ipc.new_handle(self._flat)}

    def starts(self, bucket: Bucket) -> dict[str, int]:
        """Return name → the byte at which a tensor of the bucket starts in the memory."""
        return {name: tensor.data_ptr() - self._flat.data_ptr() for name, tensor in bucket}


def mapped_send(base: SharedBase, transport: Transport) -> Callable[[Bucket], None]:
    """Return what lets the transport's targets map a bucket of one push, in place of sending it."""
    # here and not in send(), which other threads call: a GPU is a thread's own choice
    memory = {target.name: base.memory() for target in transport.targets}

    def send(bucket: Bucket) -> None:
        source = {
            "transport": MAPPED,
            "tensors": bucket_manifest(bucket),
            "starts": base.starts(bucket),
        }

        def request(target: PushTarget) -> None:
            target.weights_bucket(source | {"memory": memory[target.name]})

        transport.wait(transport.start(request))

    return send


class MappedMemory:
    """Map a trainer's memory in a replica's worker, for as long as its weights are there."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._opened = cuda_ipc.OpenedMemory(device)
        self._files: dict[str, Tensor] = {}

    def views(
        self, source: Mapping[str, Any], places: ServedPlaces, parameters: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the replica's parameters that a bucket's weights are in, each as a mapped view.

        Raises ValueError that names a weight which does not lie where its parameter needs it.
        """
        flat = self._open(source["memory"])
        starts = _parameter_starts(source["tensors"], source["starts"], places, parameters)
        for name, start in starts.items():
            parameter = parameters[name]
            end = start + parameter.numel() * parameter.itemsize
            if start < 0 or start % ALIGNMENT or end > flat.numel():
                raise ValueError(
                    f"{name} would be bytes {start} to {end} of a base of {flat.numel()} bytes; "
                    "start trainer and replica with the same version of megadiff"
                )
            yield name, _view(flat, start, parameter.dtype, parameter.shape)

    def _open(self, memory: Mapping[str, Any]) -> Tensor:
        if "handle" in memory:
            return self._opened.open(memory["handle"])
        path = locate(memory["file"])
        if path.name not in self._files:
            num_bytes = memory["num_bytes"]
            if path.stat().st_size != num_bytes:
                raise ValueError(
                    f"{path} has {path.stat().st_size} bytes, the trainer's base {num_bytes}"
                )
            # another trainer's, or the same one's from before, is let go
            self._files = {path.name: _map_file(path, num_bytes, shared=False)}
        return self._files[path.name]


def _parameter_starts(
    manifest: Manifest,
    starts: Mapping[str, int],
    places: ServedPlaces,
    parameters: Mapping[str, Tensor],
) -> dict[str, int]:
    """Return served parameter → the byte at which it starts, as each of its weights says.

    Raises ValueError for an unknown weight, another shape or dtype, or weights that do not lie end
    to end.
    """
    parameter_starts: dict[str, int] = {}
    for name, row in manifest.items():
        if name not in places:
            raise ValueError(f"the replica's model has no tensor {name}")
        served = places[name]
        parameter = parameters[served.parameter]
        begin, num_rows = _rows(served, parameter)
        expected = [num_rows, *parameter.shape[1:]]
        if row["shape"] != expected or DTYPES[row["dtype"]] != parameter.dtype:
            raise ValueError(
                f"{name} is {row['dtype']} {row['shape']}, the replica's is {parameter.dtype} "
                f"{expected}; a mapped weight cannot be another"
            )
        row_bytes = math.prod(parameter.shape[1:]) * parameter.itemsize
        start = starts[name] - begin * row_bytes
        if parameter_starts.setdefault(served.parameter, start) != start:
            raise ValueError(
                f"{name} does not lie beside the other weights of {served.parameter}; correct the "
                "served_names of the model's adapter"
            )
    return parameter_starts


def _rows(served: ServedPlace, parameter: Tensor) -> tuple[int, int]:
    """Return the first row of a weight in its parameter, and how many it has."""
    unit = parameter.shape[0] // sum(served.parts)
    return unit * sum(served.parts[: served.shard]), unit * served.parts[served.shard]


def _new_file(path: Path, num_bytes: int) -> Tensor:
    """Reserve a file's memory and map it. Raises ValueError where there is no room."""
    try:
        with path.open("r+b") as file:
            # else a page that is missing would end the process when it is written to
            os.posix_fallocate(file.fileno(), 0, num_bytes)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        status = os.statvfs(FOLDER)
        raise ValueError(
            f"{FOLDER} has {status.f_bavail * status.f_frsize} bytes free, the frozen base takes "
            f"{num_bytes}; give it more, or set lora.shared_base=never"
        ) from error
    return _map_file(path, num_bytes, shared=True)


def _map_file(path: Path, num_bytes: int, *, shared: bool) -> Tensor:
    # typed as the class that it inherits from
    storage: Any = torch.UntypedStorage.from_file(str(path), shared, num_bytes)
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _view(flat: Tensor, start: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    # a tensor of its own and no view of `flat`, which torch.compile would take into account
    stride = torch.empty(shape, device="meta").stride()
    tensor = torch.empty(0, dtype=dtype, device=flat.device)
    return tensor.set_(flat.untyped_storage(), start // dtype.itemsize, shape, stride)
