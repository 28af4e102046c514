"""One rank of a world that is not there: a single GPU then shows what a rank of many computes and
what it holds.

torch's fake process groups return at once from every collective. In place of those of FSDP2 stand
copies, on the device, of what this rank has: a gather repeats its own piece in place of the
others', a reduction takes its own part. Weights, gradients and optimizer have the sizes of the real
world and plausible values; what the links between GPUs cost is left out.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import (
    FakeStore,
)  # importing it registers the backend "fake"

# torch.distributed's functions as FSDP2 calls them: from torch 2.13 on "single", before it the
# other
STAND_INS = {
    "gather": ("all_gather_single", "all_gather_into_tensor"),
    "reduce": ("reduce_scatter_single", "reduce_scatter_tensor"),
}
calls = Counter[str]()  # of each stand-in


def check_alone(world_size: int, backend: str, sizes: Mapping[str, int]) -> None:
    """Raise ValueError for what one rank of many cannot imitate.

    sizes: name → number of GPUs that share in it, of all that could share.
    """
    if backend != "veomni" or set(sizes.values()) != {1}:
        text = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(
            f"--rank-of {world_size} imitates FSDP2's collectives on one GPU, but found "
            f"engine.backend={backend}, {text}; use engine.backend=veomni, --gpus 1 and no "
            "parallel.sp or parallel.tp"
        )


def pretend(world_size: int) -> None:
    """Make this process rank 0 of world_size, for all groups it will make.

    Call it before anything else of torch.distributed. Once in a process: it replaces functions of
    torch.distributed.
    """
    alone = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
    }
    os.environ.update(alone)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    new_group = dist.new_group

    def new_fake_group(*args: Any, **kwargs: Any) -> dist.ProcessGroup:
        return new_group(*args, **kwargs | {"backend": "fake"})

    # the second is what torch's own functions call, new_subgroups_by_enumeration() among them
    dist.new_group = new_fake_group
    dist.distributed_c10d.new_group = new_fake_group
    for kind, stand_in in (("gather", repeat_own), ("reduce", take_own)):
        for name in STAND_INS[kind]:
            setattr(dist, name, stand_in)


def check_called() -> None:
    """Raise RuntimeError when FSDP2 has not gathered and reduced by the stand-ins.

    Then this torch calls other functions.
    """
    missing = [kind for kind in STAND_INS if not calls[kind]]
    if missing:
        raise RuntimeError(
            f"FSDP2 of torch {torch.__version__} did not {' or '.join(missing)} by "
            f"{STAND_INS}; add what it calls (torch/"
            "distributed/fsdp/_fully_shard/_fsdp_collectives.py) to tools/one_rank.py"
        )


def repeat_own(output_tensor: Tensor, input_tensor: Tensor, *_: Any, **__: Any) -> None:
    """Gather as if every rank had this rank's piece.

    input_tensor: that piece. With FSDP2 it is the first part of output_tensor's own memory.
    """
    calls["gather"] += 1
    pieces = output_tensor.view(-1, input_tensor.numel())
    is_in_place = pieces.data_ptr() == input_tensor.data_ptr()
    pieces[int(is_in_place) :].copy_(input_tensor.view(1, -1))


def take_own(output: Tensor, input: Tensor, *_: Any, **__: Any) -> None:
    calls["reduce"] += 1
    output.copy_(input.view(-1, output.numel())[0].view_as(output))
