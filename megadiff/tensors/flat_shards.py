"""Cut a contiguous range of a tensor, as Megatron's distributed optimizer holds it, into boxes."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor

from megadiff.tensors.shards import Shard


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


def _boxes(
    shape: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (offsets, shape) of the boxes that elements start … stop of a row-major array make."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield (start,) * len(shape), (stop - start,) * len(shape)
        return
    row_size = math.prod(shape[1:])
    # Whole rows are first … last - 1.
    first = -(-start // row_size)
    last = stop // row_size
    if first > last:  # the range lies within a row
        yield from _row_boxes(shape, last, start, stop)
        return
    yield from _row_boxes(shape, first - 1, start, first * row_size)
    if first < last:
        yield (first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:])
    yield from _row_boxes(shape, last, last * row_size, stop)


def _row_boxes(
    shape: tuple[int, ...], row: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    begin = row * math.prod(shape[1:])
    for offsets, sizes in _boxes(shape[1:], start - begin, stop - begin):
        yield (row, *offsets), (1, *sizes)
