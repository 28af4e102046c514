"""Tensor parallelism, sequence parallelism and Ulysses against the unsharded diffusers transformer,
on gloo processes.

Samples have texts of different odd lengths, and 15 image tokens, which no number of ranks divides.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megadiff.parallel import regions
from tests.distributed.families import FAMILIES, case_of
from tests.distributed.omissions import Omission, check_omissions, patched
from tests.distributed.ranks import run_ranks
from tests.distributed.sharded_model import Layout, Ranks, check_parity, write_references

FAMILY = FAMILIES["qwen_image"]
CASE = case_of("qwen_image")
LAYOUTS = {
    1: [Layout(), Layout(budget=0.5, num_microbatches=4)],
    2: [
        Layout(tp=2, num_microbatches=2),
        Layout(tp=2, budget=1),
        Layout(tp=2, sequence_parallel=False),
        Layout(sp=2),
        Layout(num_microbatches=2),
    ],
    4: [
        Layout(tp=4),
        Layout(tp=4, sequence_parallel=False),
        Layout(tp=2),
        Layout(tp=2, sequence_parallel=False, budget=0.5),
        Layout(tp=2, sp=2, budget=0.5),
        Layout(tp=2, sp=2, sequence_parallel=False),
    ],
    8: [Layout(tp=4), Layout(tp=4, sequence_parallel=False), Layout(tp=2, sp=2)],
}
DTYPES = {1: FAMILY.dtypes, 2: FAMILY.dtypes, 4: [torch.float64], 8: [torch.float32]}


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The family's folder with what its transformer answers unsharded."""
    folder = tmp_path_factory.mktemp("model")
    write_references(FAMILY.write(folder), CASE, folder, dtypes=list(FAMILY.dtypes))
    return folder


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_equals_the_unsharded_transformer(world_size: int, pipeline: Path) -> None:
    check_parity(CASE, pipeline, LAYOUTS[world_size], list(DTYPES[world_size]), world_size)


def _own_part(
    output: Tensor, x: Tensor, *, group: dist.ProcessGroup, async_op: bool
) -> SimpleNamespace:
    """In place of a reduce-scatter."""
    output.copy_(x.chunk(group.size())[group.rank()])
    return SimpleNamespace(wait=lambda: None)


@contextmanager
def _no_input_sum_in_mlp(module: nn.Module) -> Iterator[None]:
    layers = [layer for layer in module.modules() if getattr(layer, "allreduce_dgrad", False)]
    assert len(layers) == 2 * 2  # blocks of two MLPs
    for layer in layers:
        layer.allreduce_dgrad, layer.disable_grad_reduce = False, True
    yield


WITHOUT_SP, WITH_SP = Layout(tp=2, sequence_parallel=False), Layout(tp=2)
PARALLEL = "megadiff.parallel"
OMISSIONS = {
    "sum_of_head_norms": Omission(
        layout=WITHOUT_SP,
        without=patched(f"{PARALLEL}.regions.sum_over_tp", by=lambda *args: None),
        wrong=FAMILY.head_norms,
        only=True,
    ),
    "sum_of_replicated_weights": Omission(
        layout=WITH_SP,
        without=patched(f"{PARALLEL}.regions.sum_over_tp", by=lambda *args: None),
        wrong=(
            "img_in",
            "txt_in",
            "txt_norm",
            "time_text_embed",
            "norm_out",
            "proj_out",
            "norm_q",
            "to_out.0.bias",
        ),
    ),
    "modulation_with_sp": Omission(
        layout=WITH_SP,
        without=patched(f"{PARALLEL}.linear.gather_for_parts", by=regions.gather_for_all),
        wrong=("img_mod", "txt_mod", "time_text_embed"),
        only=True,
    ),
    "modulation_input_without_sp": Omission(
        layout=WITHOUT_SP,
        without=patched(f"{PARALLEL}.linear.copy_to_group", by=lambda x, group: x),
        wrong=("time_text_embed",),
        only=True,
    ),
    "attention_input_with_sp": Omission(
        layout=WITH_SP,
        without=patched(f"{PARALLEL}.attention.gather_for_parts", by=regions.gather_for_all),
        wrong=("img_in", "txt_in", "transformer_blocks.0"),
    ),
    "attention_input_without_sp": Omission(
        layout=WITHOUT_SP,
        without=patched(f"{PARALLEL}.attention.copy_to_group", by=lambda x, group: x),
        wrong=("img_in", "txt_in", "transformer_blocks.0"),
    ),
    "mlp_input_with_sp": Omission(
        layout=WITH_SP,
        without=patched(
            "megatron.core.tensor_parallel.layers.dist_reduce_scatter_func", by=_own_part
        ),
        wrong=("img_in", "txt_in", "transformer_blocks.0"),
    ),
    "mlp_input_without_sp": Omission(
        layout=WITHOUT_SP,
        without=_no_input_sum_in_mlp,
        wrong=("img_in", "txt_in", "transformer_blocks.0"),
    ),
    "sum_over_sp": Omission(
        layout=Layout(sp=2),
        without=patched(
            "tests.distributed.sharded_model.sum_over_data_parallel", by=lambda gradient: None
        ),
        wrong=FAMILY.stream,
    ),
    "sum_over_dp": Omission(
        layout=Layout(),
        without=patched(
            "tests.distributed.sharded_model.sum_over_data_parallel", by=lambda gradient: None
        ),
        wrong=FAMILY.stream,
    ),
}


def test_each_reduction_is_needed(pipeline: Path) -> None:
    run_ranks(_omission_worker, 2, pipeline)


def _omission_worker(pipeline: Path) -> None:
    check_omissions(CASE, pipeline, OMISSIONS, torch.float64)


def test_what_cannot_be_split_is_refused(pipeline: Path) -> None:
    run_ranks(_refusal_worker, 3, pipeline)


def _refusal_worker(pipeline: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"parallel\.tp=3 does not divide dimension 0 of .*, which has \d+ elements",
    ):
        Ranks(CASE, pipeline, Layout(tp=3), torch.float32).__enter__()
    from megatron.core import parallel_state

    with pytest.raises(
        ValueError, match="megatron-core was started with {'tp': 3, 'sp': 1}, not tp=1, sp=3"
    ):
        Ranks(CASE, pipeline, Layout(sp=3), torch.float32).__enter__()
    parallel_state.destroy_model_parallel()
    with pytest.raises(ValueError, match=r"3\*1 = 3 does not divide the model's 8 attention heads"):
        Ranks(CASE, pipeline, Layout(sp=3), torch.float32).__enter__()
    from megadiff.parallel.linear import check_transformer_engine

    with (
        patch("importlib.util.find_spec", lambda name: None),
        pytest.raises(ValueError, match="which is not installed"),
    ):
        check_transformer_engine("tensorwise")
