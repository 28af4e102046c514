"""The memory of a replica's weights, given back while others need it: of those that are about to be replaced, and of those
that stay as they are."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from torch import Tensor

ALIGNMENT = 512  # bytes, of each copy on the host


class FreedWeights:
    """Weights that are about to be replaced. They keep their identity, shape and place in the module; their storages are
    empty from free() to take_back(), after which they hold whatever the memory held. Nothing is copied, on or off the device;
    the allocator keeps the memory until it is told to give it back.

    What shares a storage with one of the tensors shares its fate; one without memory now is left as it is.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._sizes = [(storage, storage.nbytes()) for storage in _storages(tensors)]

    def free(self) -> None:
        for storage, _ in self._sizes:
            storage.resize_(0)

    def take_back(self) -> None:
        """Raises torch.OutOfMemoryError when the device has no room; it may be called again then."""
        for storage, size in self._sizes:
            if storage.nbytes() != size:
                storage.resize_(size)


class ParkedWeights:
    """Weights that nobody changes, which wait in host memory: copied there once, so that later only the way back costs time.

    The host's copy of a GPU's weights is page-locked. They travel back on a stream of their own, beside what the device and
    the host do meanwhile. What shares a storage with one of the tensors shares its fate. Weights that are pages of a file
    (loaded for a CPU) stay where they are.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """Copies them: as much host memory as they take on the device is in use from here on."""
        self._storages = [storage for storage in _storages(tensors) if storage.resizable()]
        self.device = self._storages[0].device if self._storages else torch.device("cpu")
        self._copies = _empty_pieces(
            [storage.nbytes() for storage in self._storages], lock=self.device.type == "cuda"
        )
        for copy, storage in zip(self._copies, self._storages, strict=True):
            copy.copy_(_bytes_of(storage))
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def park(self) -> None:
        """Empties the tensors' storages when what the current stream does has ended; the allocator keeps the memory until it is
        told to give it back."""
        self.wait()
        if self._stream is not None:
            # whose the memory is, from fetch() on
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        for storage in self._storages:
            storage.resize_(0)

    def fetch(self) -> None:
        """Starts the way back of what is parked. Raises torch.OutOfMemoryError when the device has no room; it may be called
        again then."""
        if self._stream is not None:
            self._stream.wait_stream(
                torch.cuda.current_stream(self.device)
            )  # whose memory it may get
        with torch.cuda.stream(self._stream):
            for copy, storage in zip(self._copies, self._storages, strict=True):
                if storage.nbytes() == 0:
                    storage.resize_(copy.nbytes)
                    _bytes_of(storage).copy_(copy, non_blocking=True)

    def wait(self) -> None:
        """What the current stream does from here on finds the weights in place."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Each once, but for empty ones."""
    found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    return [storage for storage in found.values() if storage.nbytes()]


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _empty_pieces(sizes: list[int], *, lock: bool) -> list[Tensor]:
    """Of host memory, in one allocation: torch's own page-locked ones are of powers of two, up to twice what is asked for.

    Raises RuntimeError where memory cannot be locked.
    """
    ends = list(itertools.accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes))
    memory = torch.empty(ends[-1] if ends else 0, dtype=torch.uint8)
    if lock and ends:
        code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
        if code:
            raise RuntimeError(
                f"{memory.nbytes / 2**30:.1f} GiB of host memory for a sleeping replica's text encoder and VAE cannot be "
                f"page-locked (CUDA error {code}); raise the container's memory limit, or set rollout.sleep=never"
            )
    return [memory[start : start + size] for start, size in zip([0, *ends], sizes, strict=False)]
