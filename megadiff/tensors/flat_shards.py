"""Cut a contiguous range of a tensor, as Megatron's distributed optimizer holds it, into boxes."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from torch import Tensor

from megadiff.tensors.shards import Shard
from megadiff.types import Shape


def flat_shards(flat: Tensor, start: int, box: Shard) -> list[Shard]:
    """Cut a contiguous range of a box into shards that share the range's memory.

    flat: 1-D, elements start … start + numel of the row-major box. box: where the box lies in its
    full tensor; its `local` gives the box's shape only (a meta tensor will do). At most 2·ndim − 1
    shards: the end of a row, whole rows, the beginning of a row.
    """
    shards = []
    begin = 0
    for offsets_in_box, shape in _boxes(tuple(box.local.shape), start, start + flat.numel()):
        size = math.prod(shape)
        offsets = tuple(map(sum, zip(box.offsets, offsets_in_box, strict=True)))
        local = flat[begin : begin + size].view(shape)
        shards.append(Shard(local=local, offsets=offsets, shape=box.shape))
        begin += size
    return shards


def _boxes(shape: Shape, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    """Yield (offsets, shape) of the boxes that elements start … stop of a row-major array make."""
    shape = (1, *shape)  # so that the whole tensor is a row, too
    row_sizes = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    while start < stop:
        # the largest rows of which one begins here and ends in time, and as many of them as do
        axis = next(
            axis
            for axis, size in enumerate(row_sizes)
            if start % size == 0 and start + size <= stop
        )

        offsets = [int(offset) for offset in np.unravel_index(start, shape)]
        count = min((stop - start) // row_sizes[axis], shape[axis] - offsets[axis])
        sizes = (*[1] * axis, count, *shape[axis + 1 :])
        yield tuple(offsets[1:]), sizes[1:]
        start += count * row_sizes[axis]
