"""One rank of a world that is not there: a single GPU then shows what a rank of many computes and what it holds.

torch's fake process groups return at once from every collective. Those of FSDP2 copy, on the device, what this rank has: a
gather repeats its own piece in place of the others', a reduction takes its own part. Weights, gradients and optimizer have
the sizes of the real world and plausible values; what the links between GPUs cost is left out.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore  # importing it registers the backend "fake"

GATHERS = ("all_gather_into_tensor", "all_gather_single")  # FSDP2 calls the first until torch 2.12, then the second
REDUCTIONS = ("reduce_scatter_tensor", "reduce_scatter_single")


def pretend(world_size: int) -> None:
    """Makes this process rank 0 of world_size, for all groups it will make. Call it before anything else of torch.distributed.
    Once in a process: it replaces functions of torch.distributed."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    os.environ.update(alone)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    new_group = dist.new_group
    dist.new_group = lambda *args, **kwargs: new_group(*args, **kwargs | {"backend": "fake"})
    for name in GATHERS:
        setattr(dist, name, repeat_own)
    for name in REDUCTIONS:
        setattr(dist, name, take_own)


def repeat_own(output_tensor: Tensor, input_tensor: Tensor, *_: Any, **__: Any) -> None:
    """input_tensor: this rank's piece, which may be the first part of output_tensor's own memory, as it is with FSDP2."""
    pieces = output_tensor.view(-1, input_tensor.numel())
    is_in_place = pieces.data_ptr() == input_tensor.data_ptr()
    pieces[int(is_in_place) :].copy_(input_tensor.view(1, -1))


def take_own(output: Tensor, input: Tensor, *_: Any, **__: Any) -> None:
    output.copy_(input.view(-1, output.numel())[0].view_as(output))
