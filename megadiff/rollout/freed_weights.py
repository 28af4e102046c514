"""The memory of weights that are about to be replaced, given back while others need it."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


class FreedWeights:
    """The tensors keep their identity, shape and place in the module; their storages are empty from here to take_back(),
    after which they hold whatever the memory held. Nothing is copied, on or off the device; the allocator keeps the memory
    until it is told to give it back.

    What shares a storage with one of the tensors shares its fate.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        self._sizes = [(storage, storage.nbytes()) for storage in storages.values()]
        for storage in storages.values():
            storage.resize_(0)

    def take_back(self) -> None:
        """Raises torch.OutOfMemoryError when the device has no room; it may be called again then."""
        for storage, size in self._sizes:
            if storage.nbytes() != size:
                storage.resize_(size)
