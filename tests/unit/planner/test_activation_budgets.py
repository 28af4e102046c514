"""Hold the plan of a compiled block against the partition that torch.compile makes of it.

The block is a third as wide as Qwen-Image's, so that its weights matter beside a few rows. Nothing
of it runs: the partition is taken while torch compiles.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch._functorch.partitioners as partitioners
from torch._inductor.fx_utils import get_node_storage

from megadiff.config.schema import LoraConfig
from megadiff.engines.compiling import compile_blocks
from megadiff.models.adapter import ModelAdapter
from megadiff.models.registry import build_adapter
from megadiff.parallel.mesh import resolve_layout
from megadiff.planner.activation_memory import kept_bytes
from megadiff.planner.engine_memory import Placing
from megadiff.planner.work import model_shape
from tests import kept_activations
from tests.extra import extra
from tests.kept_activations import (
    activation_work,
    adapt_with_lora,
    random_rows,
    random_transformer,
    sampling_of,
)

ASSETS = Path(__file__).parents[3] / "assets"
HEADS = 8


class PartitionedError(Exception):
    """Stop torch.compile once the partition is known."""


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> ModelAdapter:
    folder = tmp_path_factory.mktemp("model") / "qwen_image"
    shutil.copytree(ASSETS / "qwen_image", folder)
    file = folder / "transformer" / "config.json"
    sizes = {"num_layers": 3, "num_attention_heads": HEADS}
    file.write_text(json.dumps(json.loads(file.read_text()) | sizes))
    return build_adapter(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "rows", "budgets", "streams"),
    [
        pytest.param(0, 8, (0.1, 0.25, 0.4, 0.75), False, marks=extra),
        pytest.param(0, 8, (0.1, 0.25, 0.4, 0.75), True, marks=extra),
        (32, 16, (0.1, 0.2, 0.45, 0.75), True),  # below the products, between, with the norms
        pytest.param(32, 16, (0.1, 0.2, 0.45, 0.75), False, marks=extra),
        pytest.param(32, 8, (0.1, 0.4, 0.6), False, marks=extra),
        (32, 2, (0.05, 0.5), False),  # unread weights are nearly as large as what is kept
    ],
)
def test_what_a_budget_keeps(adapter, monkeypatch, rank, rows, budgets, streams):
    monkeypatch.setattr(kept_activations, "ROWS", rows)
    found = partitions(adapter, monkeypatch, rank, rows, budgets, streams=streams)

    model = model_shape(adapter, LoraConfig(rank=rank) if rank else LoraConfig())
    layout = resolve_layout(dp=1, sp=1, tp=1, dp_replicate=1, world_size=1)
    where = Placing(backend="veomni", layout=layout, sequence_parallel=False)
    work = replace(activation_work(adapter, 2), compiled=True, stream_itemsize=4 if streams else 2)
    inputs = kept_bytes(model, where, replace(work, budget=0.0))
    for budget, kept in found.items():
        planned = kept_bytes(model, where, replace(work, budget=budget)) - inputs
        planned /= model.num_blocks
        assert 0.95 * kept <= planned <= 1.05 * kept, budget


def partitions(
    adapter: ModelAdapter,
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    rows: int,
    budgets: tuple[float, ...],
    *,
    streams: bool,
) -> dict[float, int]:
    """Return budget → bytes that a block keeps beyond its inputs and its weights."""
    found: dict[float, int] = {}
    choose = partitioners.choose_saved_values_set

    def record(graph, nodes, memory_budget=1.0):
        given = {get_node_storage(node) for node in nodes.inputs}
        for budget in budgets:
            kept = {
                get_node_storage(node): partitioners._size_of(node)
                for node in choose(graph, nodes, budget)
            }
            found[budget] = sum(size for key, size in kept.items() if key not in given)
        raise PartitionedError

    monkeypatch.setattr(partitioners, "choose_saved_values_set", record)
    transformer = random_transformer(adapter, torch.bfloat16)
    if rank:
        adapt_with_lora(transformer, adapter, rank)
        # the input of all blocks but a model's first carries a gradient
        transformer.img_in.requires_grad_(True)
        transformer.txt_in.requires_grad_(True)
    if streams:
        adapter.keep_streams_in_float32(transformer, torch.bfloat16)
    compile_blocks(transformer, adapter.plan, microbatch_size=rows, budget=budgets[0])

    sampling = sampling_of(adapter)
    tokens, channels = adapter.latents_shape(sampling)
    text = adapter.blank_text(kept_activations.TEXT_TOKENS)
    conditioning = {name: random_rows(tensor) for name, tensor in text.items()}
    with pytest.raises(Exception, match="PartitionedError"):
        adapter.velocity(
            transformer,
            torch.randn(rows, tokens, channels),
            torch.rand(rows),
            conditioning,
            sampling,
        )
    return found
