"""Copy and write one rank's part of a checkpoint: training goes on while the copy is written."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from megadiff.tensors.fingerprint import fingerprint
from megadiff.tensors.shard_index import TensorBox
from megadiff.tensors.shards import Shard, ShardWriter

ALIGNMENT = 512  # bytes: each copy begins at a multiple, whatever its dtype


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """One rank's part of a checkpoint.

    shards: by their tensors' names, where they are. They change with the next update, those of a
    copy do not. A shard that several ranks hold is in the part of one of them.
    num_files: of the checkpoint, one a rank. values: JSON, the same on every rank.
    """

    shards: Mapping[str, Sequence[Shard]]
    rank: int
    num_files: int
    values: Mapping[str, object] = field(default_factory=dict)

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
        """Write the rank's file in float32, whatever dtype frozen weights are held in.

        A rank without a shard writes one, too, so that a lost file is noticed.
        given_up: the folder is there, and once this is set, it returns without a finished file.
        """
        # Any rank may be the first. A folder that was given up is gone, and must not come back.
        if given_up is None:
            folder.mkdir(parents=True, exist_ok=True)

        boxes: dict[str, TensorBox] = {}
        tensors: dict[str, Tensor] = {}
        for name, shards in self.shards.items():
            for index, shard in enumerate(shards):
                key = f"{name}#{index}" if index else name
                tensors[key] = shard.local
                boxes[key] = TensorBox(
                    tensor=name,
                    shape=shard.shape,
                    offsets=shard.offsets,
                    local_shape=tuple(shard.local.shape),
                )

        writer = ShardWriter(
            folder, boxes, rank=self.rank, num_files=self.num_files, values=self.values
        )
        for key, tensor in tensors.items():
            if given_up and given_up.is_set():
                return
            # One by one, so that host memory holds the copy of one shard only.
            on_host = tensor.detach().to("cpu", torch.float32).contiguous()
            writer.fingerprints[key] = fingerprint(on_host)
            writer.file.write(key, on_host)
        writer.close(sync=True)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
