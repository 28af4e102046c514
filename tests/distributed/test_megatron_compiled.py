"""Compiled blocks under Megatron: one graph each, with their collectives, for every layout.

The backend leaves arithmetic as it is. `torch.compile` itself is what tells of graphs.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from megadiff.parallel import linear
from megadiff.types import TrainBatch
from tests.distributed.engines import LOSS, build, mine
from tests.distributed.families import FAMILIES, case_of
from tests.distributed.ranks import run_ranks
from tests.distributed.sharded_model import Case, Layout, Ranks, write_references
from tests.extra import cases

LAYOUTS = {
    1: [Layout(compiled=True)],
    2: [
        Layout(tp=2, compiled=True),
        Layout(tp=2, sequence_parallel=False, compiled=True, budget=1.0),
    ],
}


@pytest.mark.parametrize("name", cases(("sd35", "wan22_ti2v"), extra_ones=("sd35",)))
def test_equals_the_unsharded_transformer(name: str, tmp_path: Path) -> None:
    """Outputs within 2e-6 and all gradients within 5e-6, in one graph a kind of block."""
    write_references(
        FAMILIES[name].write(tmp_path), case_of(name), tmp_path, dtypes=[torch.float32]
    )
    for world_size, layouts in LAYOUTS.items():
        run_ranks(_parity_worker, world_size, case_of(name), tmp_path, layouts)


def _parity_worker(case: Case, pipeline: Path, layouts: list[Layout]) -> None:
    torch.compile = partial(torch.compile, backend="aot_eager")
    for layout in layouts:
        torch._dynamo.reset()
        counters.clear()
        with Ranks(case, pipeline, layout, torch.float32) as ranks:
            ranks.check_result()
            assert not (wrong := ranks.wrong_gradients()), f"{layout}: {wrong}"
        assert counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
        assert not counters["graph_break"], dict(counters["graph_break"])


def test_equals_it_where_layers_cut_the_graph(tmp_path: Path) -> None:
    """As Transformer Engine's do. Blocks are then recomputed from outside."""
    write_references(
        FAMILIES["sd35"].write(tmp_path), case_of("sd35"), tmp_path, dtypes=[torch.float32]
    )
    run_ranks(_cut_worker, 2, case_of("sd35"), tmp_path)


def _cut_worker(case: Case, pipeline: Path) -> None:
    torch.compile = partial(torch.compile, backend="aot_eager")
    for layer in (linear.ColumnLinear, linear.RowLinear):
        layer.forward = torch.compiler.disable(layer.forward)
    layout = Layout(tp=2, compiled=True, in_one_graph=False)
    with Ranks(case, pipeline, layout, torch.float32) as ranks:
        ranks.check_result()
        assert not (wrong := ranks.wrong_gradients()), wrong
    assert counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
    assert counters["graph_break"], "nothing cut a graph"


# widths of texts → graphs compiled so far; the last block's text leads nowhere, so each variant is
# two graphs
ODD = {7: 2, 5: 2}
ODD_AND_EVEN = {7: 2, 6: 4, 5: 4, 4: 4}


@pytest.mark.parametrize("graphs", cases((ODD, ODD_AND_EVEN), extra_ones=(ODD_AND_EVEN,)))
def test_a_text_of_another_length_compiles_nothing(
    graphs: dict[int, int], tiny_model: Path
) -> None:
    """Odd lengths share one variant, even ones another: with tp 2 an odd text is padded."""
    run_ranks(_lengths_worker, 2, tiny_model, graphs)


def _lengths_worker(tiny_model: Path, graphs: dict[int, int]) -> None:
    torch.compile = partial(torch.compile, backend="aot_eager")
    engines = [
        build(tiny_model, {"tp": 2}, backend="megatron", compiled=compiled, microbatch_size=8)
        for compiled in (False, True)
    ]
    batch = mine(engines[0])

    num_graphs = []
    for width in graphs:
        cut = _cut_texts(batch, width)
        norms = [engine.update(cut, LOSS)["optim/grad_norm"] for engine in engines]
        assert norms[1] == pytest.approx(norms[0], rel=5e-6)
        num_graphs.append(counters["stats"]["unique_graphs"])
    assert num_graphs == list(graphs.values())
    assert not counters["graph_break"], dict(counters["graph_break"])


def _cut_texts(batch: TrainBatch, width: int) -> TrainBatch:
    conditioning = {name: value[:, :width] for name, value in batch.conditioning.items()}
    conditioning["prompt_mask"] = torch.ones_like(conditioning["prompt_mask"])
    return replace(batch, conditioning=conditioning)
