"""Move what only an update needs to host memory and back, beside other work.

Tensors are emptied in place, so whoever refers to one sees it come back. On a GPU copies go through
page-locked memory, which is taken once, on a stream of their own. On a CPU they are plain copies;
the tensors are emptied likewise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum, auto

import torch
from torch import Tensor

from megadiff.config.schema import Config
from megadiff.process.host_memory import free_bytes, take_host_memory
from megadiff.types import Tensors

ALIGNMENT = 512  # bytes: each copy begins at a multiple, whatever its dtype
GIB = 2**30


def offloads(config: Config, *, num_components: int, device_type: str) -> bool:
    """Tell whether engines keep optimizer state on the host until an update needs it.

    `megadiff train` has decided by then whether auto is always: where replicas need the memory. Of
    several components auto always moves the idle ones' on a GPU.
    """
    offload = config.engine.offload
    is_idle = num_components > 1 and device_type != "cpu"
    return offload == "always" or (offload == "auto" and is_idle)


def check_free(num_bytes: int) -> None:
    """Raise ValueError where a rank's part of the host's memory cannot hold so much."""
    free = free_bytes()
    if num_bytes > free:
        raise ValueError(
            f"engine.offload keeps {num_bytes / GIB:.2f} GiB of this rank's optimizer state in "
            f"host memory, {free / GIB:.2f} GiB are free for it (the node's, divided by its "
            "ranks); set engine.offload=never, or use more GPUs"
        )


class Place(Enum):
    """Say where the values of tensors are."""

    DEVICE = auto()
    LEAVING = auto()  # on the device; copies to the host are under way
    HOST = auto()  # the device's memory is free
    RETURNING = auto()  # on the host; copies to the device are under way


class HostCopies:
    """Hold tensors, by any name, and move all of them together.

    current() is right at any moment and in any thread. What changes tensors settles them before.
    Errors leave the values where current() says.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_gpu = device.type == "cuda"
        self._place = Place.DEVICE
        self._tensors: Tensors = {}  # not those on the device
        self._copies: Tensors = {}  # host memory, which stays
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None

    @property
    def on_device(self) -> bool:
        """Tell whether tensors are where they were made, and no copy is under way."""
        return self._place is Place.DEVICE

    @property
    def moves(self) -> bool:
        """Tell whether copies are under way, in either direction."""
        return self._place in (Place.LEAVING, Place.RETURNING)

    def current(self, key: str, tensor: Tensor) -> Tensor:
        """Return where the tensor's values are now: its copy on the host, or itself."""
        is_there = self._place in (Place.HOST, Place.RETURNING)
        return self._copies[key] if is_there and key in self._tensors else tensor

    def reserve(self, tensors: Mapping[str, Tensor]) -> None:
        """Take host memory for copies of these, unless there is some: to lock it takes seconds."""
        missing = {key: tensor for key, tensor in tensors.items() if key not in self._copies}
        num_bytes = sum(_aligned(tensor.nbytes) for tensor in missing.values())
        memory = take_host_memory(num_bytes, for_gpu=self._is_gpu)
        begin = 0
        for key, tensor in missing.items():
            flat = memory[begin : begin + tensor.nbytes].view(tensor.dtype)
            self._copies[key] = flat.view(tensor.shape)
            begin += _aligned(tensor.nbytes)

    def begin_leaving(self, tensors: Mapping[str, Tensor]) -> None:
        """Begin to copy tensors to the host, each with a storage of its own.

        Only where none have left: until settle() their values are on the device.
        """
        assert self._place is Place.DEVICE
        self.reserve(tensors)
        with self._beside():
            for key, tensor in tensors.items():
                self._copies[key].copy_(tensor, non_blocking=True)
        self._tensors = dict(tensors)
        self._place = Place.LEAVING

    def settle(self) -> None:
        """Wait for copies that are under way and leave the values on the host alone.

        The device's memory goes back to torch's allocator.
        """
        if not self.moves:
            return
        if self._copied:
            self._copied.synchronize()
        for tensor in self._tensors.values():
            _resize(tensor, 0)
        self._place = Place.HOST

    def begin_returning(self) -> None:
        """Begin to copy tensors back; until arrive() their values are on the host."""
        if self._place is Place.LEAVING:
            self._await_copies()  # the next change must not come before
            self._tensors = {}
            self._place = Place.DEVICE
        if self._place is not Place.HOST:
            return

        # Here and not on the other stream: whose memory it is, frees it.
        for tensor in self._tensors.values():
            _resize(tensor, tensor.nbytes)
        with self._beside():
            for key, tensor in self._tensors.items():
                tensor.copy_(self._copies[key], non_blocking=True)
        self._place = Place.RETURNING

    def arrive(self) -> None:
        """Have all tensors on the device: what the GPU is asked for next waits for the copies."""
        self.begin_returning()
        if self._place is Place.RETURNING:
            self._await_copies()
            self._tensors = {}
            self._place = Place.DEVICE

    def put_away(self, key: str, tensor: Tensor) -> None:
        """Put one more to those on the host, at once. There is reserved memory for it."""
        assert self._place is Place.HOST
        self._copies[key].copy_(tensor)
        _resize(tensor, 0)
        self._tensors[key] = tensor

    def forget(self, prefix: str) -> None:
        """Drop tensors that are no more; memory for their copies stays."""
        names = self._tensors.keys()
        self._tensors = {key: self._tensors[key] for key in names if not key.startswith(prefix)}

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Copy beside what the current stream is asked for from now on, after what it was."""
        if not self._is_gpu:
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
            self._copied = torch.cuda.Event()
        assert self._copied
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield
            self._copied.record(self._stream)

    def _await_copies(self) -> None:
        if self._copied:
            torch.cuda.current_stream(self._device).wait_event(self._copied)


def _resize(tensor: Tensor, num_bytes: int) -> None:
    storage = tensor.untyped_storage()
    if storage.resizable():  # all but a CPU's that numpy has looked at, as writing a file does
        storage.resize_(num_bytes)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
