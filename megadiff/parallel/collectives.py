"""Collectives of the loop. Every rank of the group reaches each of them; nothing is pickled."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def all_reduce_sums(values: dict[str, float], group: dist.ProcessGroup) -> dict[str, float]:
    """Sum of each value over the group, in one float64 all-reduce on CPU. The keys must be the same on every rank."""
    return _all_reduce(values, group, dist.ReduceOp.SUM)


def all_reduce_max(values: dict[str, float], group: dist.ProcessGroup) -> dict[str, float]:
    """Maximum of each value over the group."""
    return _all_reduce(values, group, dist.ReduceOp.MAX)


def _all_reduce(
    values: dict[str, float], group: dist.ProcessGroup, op: dist.ReduceOp
) -> dict[str, float]:
    keys = sorted(values)
    packed = torch.tensor([values[key] for key in keys], dtype=torch.float64)
    dist.all_reduce(packed, op=op, group=group)
    return dict(zip(keys, packed.tolist(), strict=True))


def broadcast_bytes(payload: bytes | None, *, source: int, group: dist.ProcessGroup) -> bytes:
    """Bytes of global rank `source` on every rank of a gloo group; the others pass None."""
    if dist.get_world_size(group) == 1:
        assert payload is not None
        return payload
    size = torch.tensor([len(payload) if payload is not None else 0], dtype=torch.int64)
    dist.broadcast(size, src=source, group=group)
    buffer = torch.empty(int(size.item()), dtype=torch.uint8)
    if payload is not None:
        buffer = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else buffer
    dist.broadcast(buffer, src=source, group=group)
    return buffer.numpy().tobytes()


def broadcast_json(value: object, *, source: int, group: dist.ProcessGroup) -> Any:
    """A JSON value of global rank `source` on every rank of a gloo group."""
    payload = json.dumps(value).encode() if dist.get_rank() == source else None
    return json.loads(broadcast_bytes(payload, source=source, group=group))


def gather_json(value: object, group: dist.ProcessGroup) -> list[Any]:
    """The JSON value of every member of a gloo group, in the order of their ranks in it, on all of them."""
    payload = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(payload)]), group=group)
    room = max(int(size) for size in sizes)
    bodies = [torch.empty(room, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(bodies, torch.nn.functional.pad(payload, (0, room - len(payload))), group=group)
    return [
        json.loads(body[: int(size)].numpy().tobytes())
        for body, size in zip(bodies, sizes, strict=True)
    ]


class AgreedError(RuntimeError):
    """A failure that every rank knows of, raised on all of them at the same place of the step."""


def raise_together(error: BaseException | None, group: dist.ProcessGroup) -> None:
    """Agree on failure over a gloo group: if any rank brings an error, all raise AgreedError with that rank's text."""
    failed = torch.tensor([dist.get_rank() if error else -1], dtype=torch.int64)
    dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=group)
    source = int(failed.item())
    if source < 0:
        return
    text = broadcast_json(f"{type(error).__name__}: {error}", source=source, group=group)
    where = f"rank {source}: " if dist.get_world_size(group) > 1 else ""
    raise AgreedError(f"{where}{text}") from error


@overload
def agreed(action: Callable[[], T], group: dist.ProcessGroup) -> T: ...
@overload
def agreed(action: Callable[[], T], group: dist.ProcessGroup, *, here: bool) -> T | None: ...
def agreed(action: Callable[[], T], group: dist.ProcessGroup, *, here: bool = True) -> T | None:
    """Run the action on the ranks where `here` is true and agree on its failure. Collective over a gloo group.

    Whatever goes wrong is told to every rank before anything is raised. Returns the action's value, None elsewhere.
    """
    error: Exception | None = None
    value: T | None = None
    if here:
        try:
            value = action()
        except Exception as failure:
            error = failure
    raise_together(error, group)
    return value


def sum_tensor(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-reduced sum, out of place."""
    value = value.clone()
    dist.all_reduce(value, group=group)
    return value
