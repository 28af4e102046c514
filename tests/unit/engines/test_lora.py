"""A checkpoint and a run with another adapter, or none, do not go together: both are named, and
what to set.
"""

from __future__ import annotations

import pytest
import torch

from megadiff.engines.lora import check_lora, fill_start, lora_values
from megadiff.parallel.lora import start_values
from megadiff.tensors.shards import Shard, ShardFolder, write_shards
from megadiff.types import LoraSpec

SPEC = LoraSpec(rank=4, alpha=8.0, modules=("a", "b"))


@pytest.mark.parametrize(
    ("saved", "ours", "message"),
    [
        (
            SPEC,
            None,
            r"a LoRA of rank 4 and alpha 8.0 only, but lora.rank=0; set lora.rank=4 lora.alpha=8.0",
        ),
        (None, SPEC, r"whole trained weights and no LoRA, but lora.rank=4; set lora.rank=0"),
        (
            SPEC,
            LoraSpec(rank=2, alpha=8.0, modules=("a", "b")),
            r"of rank 4, but lora.rank=2; set lora.rank=4",
        ),
        (
            SPEC,
            LoraSpec(rank=4, alpha=4.0, modules=("a", "b")),
            r"of alpha 8.0, but lora.alpha=4.0; .*lora.alpha=8.0",
        ),
        (
            SPEC,
            LoraSpec(rank=4, alpha=8.0, modules=("b", "c")),
            r"of 2 modules.*wraps 2: only there \['a'\], only here \['c'\]",
        ),
    ],
)
def test_refusals(saved, ours, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        check_lora(_folder(tmp_path, saved), ours)


@pytest.mark.parametrize("lora", [None, SPEC])
def test_what_goes_together(lora, tmp_path):
    check_lora(_folder(tmp_path, lora), lora)


def test_pieces_of_a_start_are_parts_of_one_tensor():
    shards = [
        Shard(local=torch.empty(1, 3), offsets=(1, 2), shape=(2, 5)),
        Shard(local=torch.empty(0, 5), offsets=(2, 0), shape=(2, 5)),  # more ranks than rows
    ]
    fill_start("a.lora_A.weight", shards, seed=5)
    assert torch.equal(shards[0].local, start_values("a.lora_A.weight", (2, 5), seed=5)[1:2, 2:5])


def _folder(tmp_path, lora: LoraSpec | None) -> ShardFolder:
    values = {"optimizer_steps": {}} | ({"lora": lora_values(lora)} if lora else {})
    write_shards(tmp_path, {}, rank=0, num_files=1, values=values)
    return ShardFolder(tmp_path)
