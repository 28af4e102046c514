"""Hold the planner's bytes on links against what engines send, and shards against nodes."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megadiff.config.schema import LoraConfig
from megadiff.engines import veomni
from megadiff.models.qwen_image.adapter import QwenImageAdapter
from megadiff.parallel.mesh import resolve_layout
from megadiff.planner.engine_memory import ModelShape, Placing, Work
from megadiff.planner.network import (
    FEATURES,
    GRADIENTS,
    PUSH,
    REPLICAS,
    TOKENS,
    WEIGHTS,
    Links,
    StepPasses,
    push_traffic,
    step_traffic,
)
from megadiff.planner.work import model_shape
from tests.distributed.collectives_count import CountedCollectives
from tests.distributed.engines import LOSS, build, mine, only
from tests.distributed.ranks import run_ranks

ROWS = 16  # 8 samples of 2 steps
WIDTH = 128
TEXT = 8  # 7 tokens, padded
GATHER = "_allgather_base_"
SCATTER = "_reduce_scatter_base_"
LINKS = Links(gpus_per_node=8, nvlink=1.0, network=1.0)


def measured(folder: Path, out: Path, world_size: int, *arguments: Any) -> dict[str, float]:
    run_ranks(_measure, world_size, folder, out, *arguments)
    ranks = [json.loads((out / f"{rank}.json").read_text()) for rank in range(world_size)]
    assert all(sent == ranks[0] for sent in ranks)
    return ranks[0]


def _measure(
    folder: Path,
    out: Path,
    backend: str,
    sizes: Mapping[str, int],
    microbatch_size: int,
    scale: float,
    is_large: bool,
    pushes: bool,
    lora_rank: int = 0,
) -> None:
    if is_large:  # else a CPU always keeps whole weights between microbatches
        veomni._too_large = lambda *_: True
    engine = build(
        folder,
        sizes,
        backend=backend,
        microbatch_size=microbatch_size,
        lora=(lora_rank, float(lora_rank)),
    )
    with CountedCollectives() as counted:
        if pushes:
            list(only(engine).buckets(2**20, None, lora=False))
        else:
            engine.update(mine(engine, scale), LOSS)
    (out / f"{dist.get_rank()}.json").write_text(json.dumps(counted.sent))


def planned(
    folder: Path,
    backend: str,
    world_size: int,
    sizes: Mapping[str, int],
    microbatch_size: int,
    scale: float = 1.0,
    is_large: bool = False,
    lora_rank: int = 0,
) -> tuple[dict[str, float], ModelShape, Placing]:
    """Purpose → bytes that a rank sends in one update."""
    axes = {"dp": 0, "sp": 1, "tp": 1, "dp_replicate": 1} | dict(sizes)
    placing = Placing(
        backend=backend,
        layout=resolve_layout(**axes, world_size=world_size),
        sequence_parallel=axes["tp"] > 1,
    )
    model = model_shape(QwenImageAdapter(folder), LoraConfig(rank=lora_rank))
    microbatches = ROWS // placing.layout.dp // microbatch_size
    work = Work(
        rows=microbatch_size,
        image_tokens=9,
        text_tokens=7,
        passes=2 if scale > 1 else 1,
        itemsize=4,
        stream_itemsize=4,
        budget=0.5,
        num_microbatches=microbatches,
        accumulates=microbatches > 1 and not is_large,
        keeps_average=False,
        shares_base=lora_rank > 0,
    )
    passes = StepPasses(updates=1, microbatches=microbatches)
    rows = step_traffic(model, placing, work, passes)
    return {row.purpose: row.sent for row in rows}, model, placing


@pytest.mark.parametrize(
    ("world_size", "sizes", "microbatch_size", "scale", "is_large"),
    [
        (2, {}, 8, 1.0, False),
        (2, {}, 4, 1.0, False),  # weights are gathered once
        (2, {}, 4, 4.0, False),  # with guidance gradients are reduced twice
        (2, {}, 4, 4.0, True),  # for each microbatch, and twice with guidance
        (4, {"dp_replicate": 2}, 4, 1.0, False),
    ],
    ids=["one", "gathered_once", "guided_once", "gathered_again", "replicas"],
)
def test_fsdp_sends_what_is_planned(
    tiny_model, tmp_path, world_size, sizes, microbatch_size, scale, is_large
):
    case = (sizes, microbatch_size, scale, is_large)
    sent = measured(tiny_model, tmp_path, world_size, "veomni", *case, False)
    plan, _, _ = planned(tiny_model, "veomni", world_size, *case)
    expected = {GATHER: plan[WEIGHTS], SCATTER: plan[GRADIENTS]}
    if REPLICAS in plan:
        expected["allreduce_"] = plan[REPLICAS]
    assert sent == expected


def test_of_a_shared_base_nothing_is_sent(tiny_model, tmp_path):
    """With LoRA the adapters alone are gathered and reduced."""
    case = ({}, 8, 1.0, False)
    sent = measured(tiny_model, tmp_path, 2, "veomni", *case, False, 4)
    plan, model, _ = planned(tiny_model, "veomni", 2, *case, 4)
    assert sent == {GATHER: plan[WEIGHTS], SCATTER: plan[GRADIENTS]}
    # forward and backward of one microbatch, half of which comes from the other rank
    num_lora = sum(map(math.prod, model.lora.values()))
    assert sent[GATHER] <= 4 * num_lora * 1.1


def test_ulysses_sends_what_is_planned(tiny_model, tmp_path):
    case = ({"sp": 2}, ROWS, 1.0, False)
    sent = measured(tiny_model, tmp_path, 2, "veomni", *case, False)
    plan, _, _ = planned(tiny_model, "veomni", 2, *case)
    assert sent.pop(GATHER) == plan[WEIGHTS]
    assert sent.pop(SCATTER) == plan[GRADIENTS]
    assert sent.keys() == {"alltoall_", "allgather_", "allreduce_"}
    # nothing reads the last block's text, so its exchange has no backward
    unused = ROWS * TEXT // 2 * WIDTH * 4 / 2
    assert sum(sent.values()) == plan[TOKENS] - unused


def test_tensor_parallelism_sends_about_what_is_planned(tiny_model, tmp_path):
    """Modulations are not planned: a sixth of this tiny model's tokens, of 1,088 a hundredth."""
    case = ({"tp": 2}, ROWS, 1.0, False)
    sent = measured(tiny_model, tmp_path, 2, "megatron", *case, False)
    plan, _, _ = planned(tiny_model, "megatron", 2, *case)
    assert plan.keys() == {FEATURES}
    assert 0.7 < plan[FEATURES] / sum(sent.values()) < 1.1


def test_a_push_gathers_what_is_planned(tiny_model, tmp_path):
    sent = measured(tiny_model, tmp_path, 2, "veomni", {}, 8, 1.0, False, True)
    _, model, placing = planned(tiny_model, "veomni", 2, {}, 8)
    (row,) = push_traffic(
        placing, pushed_bytes=4 * model.num_parameters, links=LINKS, is_separate=False
    )
    assert row.purpose == PUSH
    assert sent == {GATHER: row.sent}


@pytest.mark.parametrize(
    "sizes", [{"dp_replicate": 2}, {"dp_replicate": 2, "sp": 2}], ids=["dp", "ulysses"]
)
def test_shards_are_neighbours_on_one_node(tiny_model, tmp_path, sizes):
    """Two nodes of two ranks: VeOmni's mesh has shards within each, and copies across."""
    run_ranks(_groups, 4, tiny_model, tmp_path, sizes)
    for rank in range(4):
        shards, copies, peers = json.loads((tmp_path / f"{rank}.json").read_text())
        node = rank // 2 * 2
        assert shards == [[node, node + 1]]
        assert copies == [[rank % 2, rank % 2 + 2]]
        assert peers == ([node, node + 1] if "sp" in sizes else [rank])


def _groups(folder: Path, out: Path, sizes: Mapping[str, int]) -> None:
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"])
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(rank % 2)}
    engine = build(folder, sizes, backend="veomni")
    groups: dict[bool, list[list[int]]] = {True: [], False: []}
    for parameter in only(engine).transformer.parameters():
        assert isinstance(parameter, DTensor)
        for dim, placement in enumerate(parameter.placements):
            ranks = dist.get_process_group_ranks(parameter.device_mesh.get_group(dim))
            if ranks not in groups[placement.is_shard()]:
                groups[placement.is_shard()].append(ranks)
    peers = dist.get_process_group_ranks(engine.mesh.cpu_model_group)
    (out / f"{rank}.json").write_text(json.dumps([groups[True], groups[False], peers]))
