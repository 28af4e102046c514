"""Run the loop's collectives. Every rank of the group reaches each; nothing is pickled."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from megadiff.process.words import error_text
from megadiff.types import Figures

T = TypeVar("T")
logger = logging.getLogger(__name__)
ABORT_S = 10.0  # for communicators to end their kernels


def abort_collectives() -> None:
    """End what this rank's GPU runs with other ranks; no group's NCCL can be used afterwards.

    Each group in a thread of its own. torch aborts one after another, and a small program of two
    groups then hung on H200s: probably an idle communicator waits, as it frees its memory, for the
    kernel of the other.
    """
    groups = list(distributed_c10d._world.pg_map)
    threads = [threading.Thread(target=group.abort, daemon=True) for group in groups]
    for thread in threads:
        thread.start()

    deadline = time.monotonic() + ABORT_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    num_left = sum(thread.is_alive() for thread in threads)
    if num_left:
        logger.warning("%d of %d groups are not aborted after %g s", num_left, len(groups), ABORT_S)


def all_reduce_sums(values: Figures, group: dist.ProcessGroup) -> Figures:
    """Sum each value over the group, in one float64 all-reduce on CPU.

    The keys must be the same on every rank.
    """
    return _all_reduce(values, group, dist.ReduceOp.SUM)


def all_reduce_max(values: Figures, group: dist.ProcessGroup) -> Figures:
    """Return the maximum of each value over the group; keys as for all_reduce_sums."""
    return _all_reduce(values, group, dist.ReduceOp.MAX)


def any_rank(flag: bool, group: dist.ProcessGroup) -> bool:
    """Tell whether the flag is true on any rank of the group."""
    return bool(all_reduce_max({"flag": float(flag)}, group)["flag"])


def _all_reduce(values: Figures, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType) -> Figures:
    keys = sorted(values)  # ranks may have filled their dicts in other orders
    # float64: counts stay exact, and a sum hardly depends on the number of ranks
    packed = torch.tensor([values[key] for key in keys], dtype=torch.float64)
    dist.all_reduce(packed, op=op, group=group)
    return dict(zip(keys, packed.tolist(), strict=True))


def broadcast_bytes(payload: bytes | None, *, source: int, group: dist.ProcessGroup) -> bytes:
    """Return the bytes of global rank `source` on every rank of a gloo group.

    The other ranks pass None.
    """
    if dist.get_world_size(group) == 1:
        assert payload is not None
        return payload

    # the length first: only the source knows it
    size = torch.tensor([len(payload or b"")], dtype=torch.int64)
    dist.broadcast(size, src=source, group=group)
    buffer = torch.empty(int(size.item()), dtype=torch.uint8)
    if payload:  # frombuffer refuses an empty one
        buffer = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    dist.broadcast(buffer, src=source, group=group)
    return buffer.numpy().tobytes()


def broadcast_json(value: object, *, source: int, group: dist.ProcessGroup) -> Any:
    """Return a JSON value of global rank `source` on every rank of a gloo group."""
    payload = json.dumps(value).encode() if dist.get_rank() == source else None
    return json.loads(broadcast_bytes(payload, source=source, group=group))


def gather_json(value: object, group: dist.ProcessGroup) -> list[Any]:
    """Return the JSON values of all members of a gloo group, in the order of their ranks."""
    padded = _padded_json(value, group)
    bodies = [torch.empty_like(padded) for _ in range(dist.get_world_size(group))]
    dist.all_gather(bodies, padded, group=group)
    return _parsed(bodies)


def gather_json_at(
    value: object, *, destination: int, group: dist.ProcessGroup
) -> list[Any] | None:
    """Return the JSON values of a gloo group's members, in the order of their ranks.

    Global rank `destination` alone receives and decodes them; the others get None.
    """
    padded = _padded_json(value, group)
    if dist.get_rank() != destination:
        dist.gather(padded, dst=destination, group=group)
        return None

    bodies = [torch.empty_like(padded) for _ in range(dist.get_world_size(group))]
    dist.gather(padded, bodies, dst=destination, group=group)
    return _parsed(bodies)


def _padded_json(value: object, group: dist.ProcessGroup) -> Tensor:
    """Return the value's JSON, uint8, as long as that of the member with the longest."""
    body = json.dumps(value).encode()
    longest = torch.tensor([len(body)], dtype=torch.int64)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=group)
    # gathers take tensors of one size, and JSON may end in spaces
    return torch.frombuffer(bytearray(body.ljust(int(longest.item()))), dtype=torch.uint8)


def _parsed(bodies: Sequence[Tensor]) -> list[Any]:
    return [json.loads(body.numpy().tobytes()) for body in bodies]


class AgreedError(RuntimeError):
    """Tell of a failure that every rank knows of, raised on all at the same point of the step."""


def raise_together(error: BaseException | None, group: dist.ProcessGroup) -> None:
    """Raise AgreedError on all ranks of a gloo group if any rank brings an error.

    The text is that of the highest failed rank.
    """
    # each rank's number or -1: the largest is one that failed, the same for all
    failed = torch.tensor([dist.get_rank() if error else -1], dtype=torch.int64)
    dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=group)
    source = int(failed.item())
    if source < 0:
        return

    text = broadcast_json(error_text(error) if error else "", source=source, group=group)
    where = f"rank {source}: " if dist.get_world_size(group) > 1 else ""
    raise AgreedError(f"{where}{text}") from error


@overload
def agreed(action: Callable[[], T], group: dist.ProcessGroup) -> T: ...
@overload
def agreed(action: Callable[[], T], group: dist.ProcessGroup, *, here: bool) -> T | None: ...
def agreed(action: Callable[[], T], group: dist.ProcessGroup, *, here: bool = True) -> T | None:
    """Run the action on the ranks where `here` is true and agree on its failure.

    Returns the action's value, None elsewhere. Collective over a gloo group.
    """
    error: Exception | None = None
    value: T | None = None
    if here:
        try:
            value = action()
        except Exception as failure:  # any kind: a rank that raised alone would hang the others
            error = failure
    raise_together(error, group)
    return value


def read_once(
    read: Callable[[], object], *, source: int, group: dist.ProcessGroup, world: dist.ProcessGroup
) -> Any:
    """Return on a gloo group's ranks the JSON value that its global rank `source` reads.

    Collective over the gloo group `world`, whose ranks agree on a failure of any source.
    """
    value = agreed(read, world, here=dist.get_rank() == source)
    return broadcast_json(value, source=source, group=group)


def sum_tensor(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum the tensor over the group, out of place."""
    value = value.clone()
    dist.all_reduce(value, group=group)
    return value
