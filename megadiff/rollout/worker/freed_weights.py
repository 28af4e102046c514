"""Give the memory of a replica's weights back while the trainer needs it.

FreedWeights are about to be replaced. ParkedWeights stay as they are, and wait on the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from torch import Tensor

from megadiff.process.host_memory import lock_host_memory

ALIGNMENT = 512  # bytes: each copy on the host starts at a multiple, whatever its dtype


class FreedWeights:
    """Empty the storages of weights that are about to be replaced, and fill them up again.

    Parameters keep their identity and shape in the module. From free() to take_back() their
    storages are empty; after that they hold whatever the memory held. Nothing is copied. The
    allocator keeps the memory until it is told to give it back.
    What shares a storage with one of the tensors shares its fate. One without memory at the start
    is left as it is.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._sizes = [(storage, storage.nbytes()) for storage in _storages(tensors)]

    def free(self) -> None:
        for storage, _ in self._sizes:
            storage.resize_(0)

    def take_back(self) -> None:
        """Allocate all storages that are empty.

        Raises torch.OutOfMemoryError when the device is full; it may be called again then.
        """
        for storage, size in self._sizes:
            if storage.nbytes() != size:
                storage.resize_(size)


class ParkedWeights:
    """Keep weights that nobody changes in host memory while they are not needed.

    They are copied there once, so that later only the way back costs time. The host's copy of a
    GPU's weights is page-locked. They travel back on a stream of their own, beside what device and
    host do meanwhile. What shares a storage with one of the tensors shares its fate. Weights that
    are pages of a file (loaded for a CPU) stay where they are.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """Copy them: from here on they take as much host memory as device memory."""
        self._storages = [storage for storage in _storages(tensors) if storage.resizable()]
        self.device = self._storages[0].device if self._storages else torch.device("cpu")
        is_cuda = self.device.type == "cuda"
        sizes = [storage.nbytes() for storage in self._storages]
        self._copies = _host_buffers(sizes, lock=is_cuda)
        for copy, storage in zip(self._copies, self._storages, strict=True):
            # As bytes: a storage may hold tensors of several dtypes.
            copy.copy_(_bytes_of(storage))
        self._stream = torch.cuda.Stream(self.device) if is_cuda else None

    def park(self) -> None:
        """Empty the tensors' storages once the current stream's work is done.

        The allocator keeps the memory until it is told to give it back.
        """
        self.wait()
        if self._stream is not None:
            # fetch() allocates on this stream, so the memory returns to it
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        for storage in self._storages:
            storage.resize_(0)

    def fetch(self) -> None:
        """Start the way back of what is parked.

        Raises torch.OutOfMemoryError when the device is full; it may be called again then.
        """
        if self._stream is not None:
            # the allocator may hand out memory that the current stream still uses
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            for copy, storage in zip(self._copies, self._storages, strict=True):
                if storage.nbytes() == 0:
                    storage.resize_(copy.nbytes)
                    _bytes_of(storage).copy_(copy, non_blocking=True)

    def wait(self) -> None:
        """Make the current stream wait until the weights are in place."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Return each storage once, without empty ones."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    by_address = {storage.data_ptr(): storage for storage in storages}
    return [storage for storage in by_address.values() if storage.nbytes()]


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _host_buffers(sizes: list[int], *, lock: bool) -> list[Tensor]:
    """Return uint8 tensors of these sizes in one allocation, page-locked if told so.

    Raises RuntimeError where memory cannot be locked.
    """
    ends = list(itertools.accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes))
    num_bytes = ends[-1] if ends else 0
    memory = torch.empty(0 if lock else num_bytes, dtype=torch.uint8)

    if lock:
        memory, code = lock_host_memory(num_bytes)
        if code:
            raise RuntimeError(
                f"{memory.nbytes / 2**30:.1f} GiB of host memory for a sleeping replica's text "
                f"encoder and VAE cannot be page-locked (CUDA error {code}); raise the container's "
                "memory limit, or set rollout.sleep=never"
            )
    # not strict: nothing begins at the last end
    return [memory[start : start + size] for start, size in zip([0, *ends], sizes, strict=False)]
