"""Which part of each tensor a replica's worker has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megadiff.tensors.lora_names import Box


def worker_boxes(
    shapes: Mapping[str, Sequence[int]], views: Mapping[str, Sequence[int]], *, rank: int, size: int
) -> dict[str, Box]:
    """name → the part of the full tensor that worker `rank` of `size` has, of tensors that it does not have whole.

    shapes: of the full tensors, views: of what this worker has of them. Raises ValueError when that is no equal part.
    """
    boxes: dict[str, Box] = {}
    for name, view in views.items():
        full = shapes[name]
        cut = (
            [axis for axis in range(len(full)) if full[axis] != view[axis]]
            if len(view) == len(full)
            else None
        )
        if cut == []:
            continue
        if cut is None or len(cut) > 1 or view[cut[0]] * size != full[cut[0]]:
            raise ValueError(
                f"{name} is {list(view)} on worker {rank} of {size}, which is no equal part of {list(full)}"
            )
        begin = rank * view[cut[0]]
        part = (begin, begin + view[cut[0]])
        boxes[name] = tuple(
            part if axis == cut[0] else (0, length) for axis, length in enumerate(full)
        )
    return boxes


def boxes_from_json(value: Mapping[str, Sequence[Sequence[int]]]) -> dict[str, Box]:
    """worker_boxes' value after a way through JSON, which has lists for tuples."""
    return {name: tuple((begin, end) for begin, end in box) for name, box in value.items()}
