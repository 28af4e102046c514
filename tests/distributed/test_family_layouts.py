"""Every family under tensor parallelism, sequence parallelism, Ulysses and data parallelism against
its unsharded transformer, by Megatron-core's layers and by VeOmni's FSDP2, on gloo processes.

Qwen-Image has tests of its own (test_tensor_parallel, test_engine_layouts), with more layouts.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel
from torch import Tensor

from megadiff.models.wan22.adapter import WanAdapter
from megadiff.models.z_image.attention import ZImageAttention
from megadiff.parallel.regions import Group
from megadiff.parallel.tokens import split_tokens
from megadiff.tensors.source_folder import SourceFolder
from tests.distributed.families import FAMILIES, Family, case_of
from tests.distributed.omissions import Omission, check_omissions, patched
from tests.distributed.ranks import run_ranks
from tests.distributed.sharded_model import (
    Layout,
    Ranks,
    check_parity,
    check_veomni,
    write_references,
)
from tests.extra import cases

LAYOUTS = {
    2: [
        Layout(tp=2, num_microbatches=2),
        Layout(tp=2, sequence_parallel=False, budget=1),
        Layout(sp=2),
        Layout(num_microbatches=2),  # dp 2
    ],
    4: [Layout(tp=4), Layout(tp=4, sequence_parallel=False), Layout(tp=2, sp=2, budget=0.5)],
}
WITHOUT_SP, WITH_SP = Layout(tp=2, sequence_parallel=False), Layout(tp=2)
NAMES = [name for name in FAMILIES if name != "qwen_image"]
LIKE_OTHERS = [("edit_2509", 4), ("wan21_t2v", 4), ("wan22_i2v", 4)]


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Family → its folder with what the transformer answers unsharded; made when asked for."""

    class Folders(dict):
        def __missing__(self, name: str) -> Path:
            folder = self[name] = tmp_path_factory.mktemp("families") / name
            family = FAMILIES[name]
            write_references(
                family.write(folder), case_of(name), folder, dtypes=list(family.dtypes)
            )
            return folder

    return Folders()


@pytest.mark.parametrize(
    ("name", "world_size"), cases(product(NAMES, LAYOUTS), extra_ones=LIKE_OTHERS)
)
def test_equals_the_unsharded_transformer(
    name: str, world_size: int, pipelines: dict[str, Path]
) -> None:
    # at four ranks float32 shows what float64 would
    dtypes = FAMILIES[name].dtypes if world_size < 4 else [torch.float32]
    check_parity(case_of(name), pipelines[name], LAYOUTS[world_size], list(dtypes), world_size)


@pytest.mark.parametrize("sp", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_equals_it_under_veomni(name: str, sp: int, pipelines: dict[str, Path]) -> None:
    run_ranks(check_veomni, 2, case_of(name), pipelines[name], sp)


def omissions_of(family: Family) -> dict[str, Omission]:
    without_tp_sum = patched("megadiff.parallel.regions.sum_over_tp", by=lambda *args: None)
    omissions = {
        "sum_of_what_is_whole": Omission(
            layout=WITH_SP, without=without_tp_sum, wrong=family.outside
        ),
        "sum_over_sp": Omission(
            layout=Layout(sp=2),
            without=patched(
                "tests.distributed.sharded_model.sum_over_data_parallel", by=lambda gradient: None
            ),
            wrong=family.stream,
        ),
    }
    if family.head_norms:
        omissions["sum_of_head_norms"] = Omission(
            layout=WITHOUT_SP, without=without_tp_sum, wrong=family.head_norms, only=True
        )
    return omissions


class _SummedForwardOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part: Tensor, group: Group) -> Tensor:
        total = part.clone()
        dist.all_reduce(total, group=group.process_group)
        return total

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


# norms across heads and cross attention are Wan's alone
OF_WAN = {
    "sum_in_the_backward_of_across_heads_norms": Omission(
        layout=WITHOUT_SP,
        without=patched("megadiff.parallel.linear.sum_over_group", by=_SummedForwardOnly.apply),
        wrong=("attn1.to_q", "attn1.to_k", "attn2.to_q", "attn2.to_k"),
    ),
    "context_without_sp": Omission(
        layout=WITHOUT_SP,
        without=patched(
            "megadiff.parallel.attention.TokenAxes.enter_context", by=lambda axes, context: context
        ),
        wrong=("text_embedder",),
        only=True,
    ),
}


@pytest.mark.parametrize("name", ["sd35", "z_image", "edit_2511", "wan22_ti2v", "bagel"])
def test_each_reduction_is_needed(name: str, pipelines: dict[str, Path]) -> None:
    run_ranks(_omission_worker, 2, name, pipelines[name])


def _omission_worker(name: str, pipeline: Path) -> None:
    omissions = omissions_of(FAMILIES[name]) | (OF_WAN if name == "wan22_ti2v" else {})
    check_omissions(case_of(name), pipeline, omissions, torch.float32)


def _turned_by_the_first_row(self, attn, hidden_states, *, freqs_cis, **kwargs):
    return ZIMAGE_CALL(self, attn, hidden_states, freqs_cis=freqs_cis[:1], **kwargs)


ZIMAGE_CALL = ZImageAttention.__call__
FORWARD_FAULTS = {
    "sd35": lambda: patch.object(SourceFolder, "read_constants", lambda *args: None),
    "z_image": lambda: patch.object(ZImageAttention, "__call__", _turned_by_the_first_row),
}


@pytest.mark.parametrize("name", FORWARD_FAULTS)
def test_a_faulty_forward_is_found(name: str, pipelines: dict[str, Path]) -> None:
    """Positions that are not read from the files; all rows turned by the first one's positions."""
    run_ranks(_fault_worker, 2, name, pipelines[name])


def _fault_worker(name: str, pipeline: Path) -> None:
    with (
        FORWARD_FAULTS[name](),
        Ranks(case_of(name), pipeline, WITH_SP, torch.float32) as ranks,
        pytest.raises(AssertionError, match="velocity differs by"),
    ):
        ranks.check_result()


def test_a_replaced_forward_is_refused(
    pipelines: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def sliced(self, **kwargs: object) -> None:
        """As VeOmni puts its own in diffusers' place."""

    adapter = WanAdapter(pipelines["wan21_t2v"])
    monkeypatch.setattr(WanTransformer3DModel, "forward", sliced)
    with pytest.raises(
        ValueError, match="WanTransformer3DModel.forward is no longer its own but tests"
    ):
        split_tokens(
            adapter.empty_transformer(), adapter.plan, axes=None, attention=adapter.attention
        )
