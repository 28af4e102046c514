"""Gather whole tensors from their shards, many small ones in one collective."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

GATHERED_AT_ONCE = 1 << 26  # bytes: two copies of it are alive beside the bucket


def runs(num_bytes: Mapping[str, int], limit: int) -> Iterator[list[str]]:
    """Yield the names in order, in runs of at most `limit` bytes or of one larger tensor."""
    run: list[str] = []
    size = 0
    for name, more in num_bytes.items():
        if run and size + more > limit:
            yield run
            run = []
            size = 0
        run.append(name)
        size += more
    if run:
        yield run


def gather_flat(shards: list[Tensor], dtype: torch.dtype, group: dist.ProcessGroup) -> list[Tensor]:
    """Gather each shard [n] to [ranks, n] in dtype. Collective; n is the same on all ranks."""
    # one copy and one collective for all: a collective of a small tensor is all latency
    joined_N = torch.cat(shards).to(dtype)
    whole_RN = joined_N.new_empty(dist.get_world_size(group), joined_N.numel())
    dist.all_gather_into_tensor(whole_RN.view(-1), joined_N, group=group)
    return list(whole_RN.split([shard.numel() for shard in shards], dim=1))


def gather_rows(
    shards: Sequence[Tensor],
    shapes: Sequence[Sequence[int]],
    dtype: torch.dtype,
    group: dist.ProcessGroup,
) -> list[Tensor]:
    """Gather whole tensors of these shapes from the rows that each rank has. Collective.

    Rows are split as torch.chunk does: the last ranks have fewer, or none.
    """
    ranks = dist.get_world_size(group)
    sizes = [-(-shape[0] // ranks) * math.prod(shape[1:]) for shape in shapes]
    # a collective needs equal sizes: short shards are padded here, and cut to shape below
    padded = [_padded(shard.reshape(-1), size) for shard, size in zip(shards, sizes, strict=True)]
    gathered = gather_flat(padded, dtype, group)
    return [
        flat_RN.reshape(-1)[: math.prod(shape)].view(*shape)
        for flat_RN, shape in zip(gathered, shapes, strict=True)
    ]


def _padded(flat: Tensor, size: int) -> Tensor:
    missing = size - flat.numel()
    return torch.cat([flat, flat.new_zeros(missing)]) if missing else flat


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard, which shares memory with the tensor."""
    if not isinstance(tensor, DTensor):
        return tensor
    # with autograd it costs 50 µs a tensor, 20 ms a step
    with torch.no_grad():
        return tensor.to_local()
