"""Copy one rank's part of a checkpoint, so that training goes on while it is written."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from megadiff.tensors.shards import Shard, write_shards

ALIGNMENT = 512  # bytes: each copy begins at a multiple, whatever its dtype


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """One rank's part of a checkpoint, as write_shards() takes it.

    shards: by their tensors' names, where they are. They change with the next update, those of a
    copy do not.
    """

    shards: Mapping[str, Sequence[Shard]]
    rank: int
    num_files: int
    values: Mapping[str, object]

    @property
    def num_bytes(self) -> int:
        """Return how much memory a copy takes."""
        return sum(
            _aligned(shard.local.nbytes) for shards in self.shards.values() for shard in shards
        )

    def copied(self, memory: Tensor) -> Snapshot:
        """Return a copy whose tensors lie in memory: uint8 on the host, of num_bytes or more."""
        begin = 0
        is_cuda = False
        copies: dict[str, list[Shard]] = {}
        for name, shards in self.shards.items():
            copies[name] = []
            for shard in shards:
                source = shard.local.detach()
                flat = memory[begin : begin + source.nbytes].view(source.dtype)
                copy = flat.view(source.shape)
                copy.copy_(source, non_blocking=True)
                is_cuda |= source.is_cuda
                copies[name].append(replace(shard, local=copy))
                begin += _aligned(source.nbytes)
        if is_cuda:
            # Once for all copies; page-locked memory is not waited for by copy_().
            torch.cuda.current_stream().synchronize()
        return replace(self, shards=copies)

    def write(self, folder: Path, given_up: threading.Event | None = None) -> None:
        """Write it as write_shards() does."""
        write_shards(
            folder,
            self.shards,
            rank=self.rank,
            num_files=self.num_files,
            values=self.values,
            given_up=given_up,
        )


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
