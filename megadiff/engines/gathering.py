"""Whole tensors from the pieces of them that ranks hold: of many small ones together, in one collective."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

GATHERED_AT_ONCE = 1 << 26  # bytes: two copies of it are alive beside the bucket


def runs(num_bytes: Mapping[str, int], limit: int) -> Iterator[list[str]]:
    """The names in order, in runs of at most `limit` bytes; a larger tensor is a run of its own."""
    run: list[str] = []
    size = 0
    for name, more in num_bytes.items():
        if run and size + more > limit:
            yield run
            run, size = [], 0
        run.append(name)
        size += more
    if run:
        yield run


def gather_flat(
    pieces: Sequence[Tensor], dtype: torch.dtype, group: dist.ProcessGroup
) -> list[Tensor]:
    """Collective. Each piece [n] → [ranks, n] in dtype, what every rank has there; n is the same on all of them."""
    own = torch.cat(pieces).to(dtype)
    whole_RN = own.new_empty(dist.get_world_size(group), own.numel())
    dist.all_gather_into_tensor(whole_RN.view(-1), own, group=group)
    return list(whole_RN.split([piece.numel() for piece in pieces], dim=1))


def gather_rows(
    pieces: Sequence[Tensor],
    shapes: Sequence[Sequence[int]],
    dtype: torch.dtype,
    group: dist.ProcessGroup,
) -> list[Tensor]:
    """Collective. Whole tensors of these shapes, of which each rank has rows as torch.chunk cuts them: the last ranks fewer,
    or none."""
    ranks = dist.get_world_size(group)
    sizes = [-(-shape[0] // ranks) * math.prod(shape[1:]) for shape in shapes]
    filled = [_filled(piece.reshape(-1), size) for piece, size in zip(pieces, sizes, strict=True)]
    gathered = gather_flat(filled, dtype, group)
    return [
        every_RN.reshape(-1)[: math.prod(shape)].view(*shape)
        for every_RN, shape in zip(gathered, shapes, strict=True)
    ]


def _filled(flat: Tensor, size: int) -> Tensor:
    missing = size - flat.numel()
    return torch.cat([flat, flat.new_zeros(missing)]) if missing else flat


def local(tensor: Tensor) -> Tensor:
    """This rank's piece, sharing memory with the tensor. Without autograd: its way costs 50 µs a tensor, 20 ms a step."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()
