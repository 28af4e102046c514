"""Tell whether boxes make up a tensor: each element in exactly one of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import product

Box = tuple[Sequence[int], Sequence[int]]  # offsets, shape


def cover(boxes: Iterable[Box], shape: Sequence[int]) -> bool:
    """Tell whether the boxes are disjoint and cover a tensor of the shape.

    The corners of a box, counted with alternating signs, determine the box. So boxes add up to the
    whole tensor, each element once, just when their corners add up to its corners. This is exact in
    any number of dimensions, and takes time linear in the boxes.
    """
    corners: Counter[tuple[int, ...]] = Counter()
    for offsets, sizes in boxes:
        _add(corners, offsets, sizes, sign=1)
    # what is left where nothing is missing and nothing is there twice: 0 at every corner
    _add(corners, (0,) * len(shape), shape, sign=-1)
    return not any(corners.values())


def _add(
    corners: Counter[tuple[int, ...]], offsets: Sequence[int], sizes: Sequence[int], *, sign: int
) -> None:
    edges = [(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True)]
    for corner, corner_sign in zip(product(*edges), _signs(len(edges)), strict=True):
        corners[corner] += sign * corner_sign


@cache
def _signs(num_dimensions: int) -> tuple[int, ...]:
    """Return the signs of a box's corners, in the order of product().

    A corner's sign is the product over its dimensions: + where the box begins, − where it ends.
    """
    return tuple(math.prod(directions) for directions in product((1, -1), repeat=num_dimensions))
