"""Find which part of each tensor a replica's worker has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from megadiff.tensors.lora_names import Box
from megadiff.types import JsonObject


def worker_boxes(
    shapes: Mapping[str, Sequence[int]], views: Mapping[str, Sequence[int]], *, rank: int, size: int
) -> dict[str, Box]:
    """Return worker `rank`'s boxes of the tensors that it does not have whole.

    shapes: of the full tensors. views: of what this worker, one of `size`, has of them. Raises
    ValueError when that is no equal part.
    """
    boxes: dict[str, Box] = {}
    for name, view in views.items():
        full = shapes[name]
        if list(view) == list(full):
            continue
        # vllm-omni cuts along one axis, into equal parts; anything else would be loaded wrongly
        has_all_axes = len(view) == len(full)
        cut_axes = [
            axis for axis, length in enumerate(view) if has_all_axes and length != full[axis]
        ]
        if len(cut_axes) != 1 or view[cut_axes[0]] * size != full[cut_axes[0]]:
            raise ValueError(
                f"{name} is {list(view)} on worker {rank} of {size}, which is no equal part of "
                f"{list(full)}"
            )

        axis = cut_axes[0]
        box = [(0, length) for length in full]
        box[axis] = (rank * view[axis], (rank + 1) * view[axis])
        boxes[name] = tuple(box)
    return boxes


def boxes_from_json(workers: Iterable[JsonObject]) -> list[dict[str, Box]]:
    """Return each worker's boxes, which JSON has under `boxes` and with lists for tuples."""
    boxes = []
    for worker in workers:
        boxes.append({name: _box(pairs) for name, pairs in worker["boxes"].items()})
    return boxes


def _box(pairs: Iterable[Sequence[int]]) -> Box:
    return tuple((begin, end) for begin, end in pairs)
