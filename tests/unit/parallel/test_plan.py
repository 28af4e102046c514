"""The plan's arithmetic: who holds what, and what is refused."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import prod

import pytest
import torch

from megadiff.parallel import megatron_cpu
from megadiff.parallel.plan import ParallelPlan, module_of, shard_box

PLAN = ParallelPlan(
    rules={
        "embed": "replicated",
        "transformer_blocks.*.attn.norm": "head_norm",
        "transformer_blocks.*.attn.to_[qk]": "column",
        "transformer_blocks.*.attn.out": "row",
        "transformer_blocks.*.mod": "modulation",
    },
    unused=("transformer_blocks.{last}.attn.out",),
)
SHAPES = {
    "embed.weight": (8, 3),
    "transformer_blocks.0.attn.norm.weight": (2,),
    "transformer_blocks.0.attn.to_q.weight": (12, 8),
    "transformer_blocks.0.attn.to_k.bias": (12,),
    "transformer_blocks.0.attn.out.weight": (8, 12),
    "transformer_blocks.0.attn.out.bias": (8,),
    "transformer_blocks.0.mod.weight": (24, 8),
    "transformer_blocks.10.attn.out.weight": (8, 12),
    "transformer_blocks.10.attn.out.bias": (8,),
}
SUMMED = {
    False: {"transformer_blocks.0.attn.norm.weight"},
    True: {
        "embed.weight",
        "transformer_blocks.0.attn.norm.weight",
        "transformer_blocks.0.attn.out.bias",
        "transformer_blocks.10.attn.out.bias",
    },
}


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_pieces_of_all_ranks_make_up_each_tensor(tp: int) -> None:
    ranks = [
        PLAN.placements(SHAPES, tp=tp, tp_rank=rank, sequence_parallel=True) for rank in range(tp)
    ]
    for name, shape in SHAPES.items():
        times_held = torch.zeros(shape, dtype=torch.int64)
        for placements in ranks:
            place = placements[name]
            assert place.shape == shape
            box = tuple(
                slice(at, at + size)
                for at, size in zip(place.offsets, place.local_shape, strict=True)
            )
            assert times_held[box].numel() == prod(place.local_shape)
            times_held[box] += 1
        expected = 1 if ranks[0][name].sharded_dim is not None else tp
        assert bool((times_held == expected).all()), name


def test_which_dimension_is_split() -> None:
    local = {name: place.local_shape for name, place in _placements(tp=4).items()}
    assert local == SHAPES | {
        "transformer_blocks.0.attn.to_q.weight": (3, 8),
        "transformer_blocks.0.attn.to_k.bias": (3,),
        "transformer_blocks.0.attn.out.weight": (8, 3),
        "transformer_blocks.0.mod.weight": (6, 8),
        "transformer_blocks.10.attn.out.weight": (8, 3),
    }


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_which_gradients_are_parts(sequence_parallel: bool) -> None:
    found = _placements(tp=2, sequence_parallel=sequence_parallel)
    assert {name for name, place in found.items() if place.sum_over_tp} == SUMMED[sequence_parallel]
    alone = _placements(tp=1, sequence_parallel=sequence_parallel)
    assert not any(place.sum_over_tp for place in alone.values())


LORA = {  # of two modules, rank 2
    "transformer_blocks.0.attn.to_q.lora_A.weight": (2, 8),
    "transformer_blocks.0.attn.to_q.lora_B.weight": (12, 2),
    "transformer_blocks.0.attn.out.lora_A.weight": (2, 12),
    "transformer_blocks.0.attn.out.lora_B.weight": (8, 2),
}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_of_a_low_rank_pair_one_is_split_and_the_other_a_part(sequence_parallel: bool) -> None:
    placements = PLAN.placements(
        SHAPES | LORA, tp=2, tp_rank=1, sequence_parallel=sequence_parallel
    )
    found = {name: (placements[name].local_shape, placements[name].offsets) for name in LORA}
    assert list(found.values()) == [
        ((2, 8), (0, 0)),
        ((6, 2), (6, 0)),
        ((2, 6), (0, 6)),
        ((8, 2), (0, 0)),
    ]
    assert [placements[name].sum_over_tp for name in LORA] == [True, False, False, True]
    assert [placements[name].kind for name in LORA] == ["column", "column", "row", "row"]
    alone = PLAN.placements(SHAPES | LORA, tp=1, tp_rank=0, sequence_parallel=sequence_parallel)
    assert not any(place.sum_over_tp for place in alone.values())


def test_which_modules_lora_wraps() -> None:
    def modules(*targets: str, names: Iterable[str] = SHAPES) -> tuple[str, ...]:
        return replace(PLAN, lora_targets=targets).lora_modules(names)

    targets = ("transformer_blocks.*.attn.to_[qk]", "transformer_blocks.*.attn.out")
    expected = tuple(
        f"transformer_blocks.0.attn.{name}" for name in ("out", "to_k", "to_q")
    )  # 10.attn.out is unused
    assert modules(*targets) == modules(*targets, names=[*SHAPES, *LORA]) == expected
    assert modules(*targets, targets[0]) == expected
    with pytest.raises(
        ValueError, match=r"no module is matched by the LoRA target 'transformer_blocks.\*.ff'"
    ):
        modules("transformer_blocks.*.ff", *targets)
    with pytest.raises(
        ValueError,
        match=r"the LoRA target 'transformer_blocks.\*.mod' matches .*0.mod, which is modulation",
    ):
        modules("transformer_blocks.*.mod")


def test_the_module_of_a_parameter() -> None:
    assert [module_of(name) for name in ("a.to_q.weight", "a.to_q.lora_B.weight", "bias")] == [
        "a.to_q",
        "a.to_q",
        "",
    ]


def test_the_last_block_is_the_last_by_number() -> None:
    assert PLAN.unused_names(SHAPES) == {
        name for name in SHAPES if name.startswith("transformer_blocks.10.attn.out.")
    }


def test_every_parameter_needs_exactly_one_rule_and_every_rule_a_parameter() -> None:
    with pytest.raises(ValueError, match="extra.weight is matched by no rule"):
        PLAN.kinds([*SHAPES, "extra.weight"])
    twice = ParallelPlan(rules={"embed": "replicated", "emb*": "column"})
    with pytest.raises(ValueError, match=r"embed.weight is matched by 'embed' and 'emb\*'"):
        twice.kinds(["embed.weight"])
    with pytest.raises(ValueError, match=r"no parameter is matched by 'transformer_blocks.\*.mod'"):
        PLAN.kinds([name for name in SHAPES if ".mod." not in name])
    with pytest.raises(ValueError, match="unknown kind columns; the kinds are column, row"):
        ParallelPlan(rules={"embed": "columns"})


def test_a_size_that_does_not_divide_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"parallel.tp=5 does not divide dimension 1 of a.weight, which has 12 elements",
    ):
        shard_box("row", "a.weight", (8, 12), tp=5, tp_rank=0)


def test_blocks_of_several_lists() -> None:
    plan = ParallelPlan(
        rules={"*": "replicated"},
        blocks=("double.*", "single.*"),
        unused=("double.{last}.text", "single.{last}.gate"),
    )
    names = [f"double.{i}.text.weight" for i in range(3)]
    names += [f"single.{i}.gate.weight" for i in range(12)]
    assert plan.block_of("double.2.text.weight") == "double.2"
    assert plan.block_of("single.2.gate.weight") == "single.2"
    assert [plan.is_block(name) for name in ("single.11", "single", "single.1.gate")] == [
        True,
        False,
        False,
    ]
    assert plan.unused_names(names) == {"double.2.text.weight", "single.11.gate.weight"}


def test_blocks_and_attention_sites() -> None:
    assert [PLAN.block_of(name) for name in ("transformer_blocks.10.mod.bias", "embed.weight")] == [
        "transformer_blocks.10",
        None,
    ]
    assert PLAN.is_block("transformer_blocks.3") and not PLAN.is_block("transformer_blocks.3.attn")
    assert PLAN.is_attention("transformer_blocks.3.attn") and not PLAN.is_attention(
        "transformer_blocks.3.attn.to_q"
    )
    assert PLAN.in_attention("transformer_blocks.3.attn.to_q") and not PLAN.in_attention(
        "transformer_blocks.3.mod"
    )


def test_stand_ins_for_cuda_never_act_on_a_gpu() -> None:
    stock = torch.cuda.current_device
    megatron_cpu.apply(torch.device("cuda", 0))
    assert torch.cuda.current_device is stock


def _placements(*, tp: int, sequence_parallel: bool = True):
    return PLAN.placements(SHAPES, tp=tp, tp_rank=0, sequence_parallel=sequence_parallel)


def test_a_rule_may_name_a_parameter_of_a_block_itself() -> None:
    plan = ParallelPlan(
        rules={"*table": "replicated", "blocks.*.norm": "across_heads_norm"},
        blocks="blocks.*",
    )
    shapes = {"table": (1, 2), "blocks.0.table": (1, 6), "blocks.0.norm.weight": (8,)}
    places = plan.placements(shapes, tp=4, tp_rank=3, sequence_parallel=True)
    assert places["table"].sum_over_tp and places["blocks.0.table"].local_shape == (1, 6)
    norm = places["blocks.0.norm.weight"]
    assert (norm.offsets, norm.local_shape, norm.sum_over_tp) == ((6,), (2,), False)
    with pytest.raises(ValueError, match="blocks.0.table is matched by 'blocks.0' and '\\*table'"):
        ParallelPlan(rules={"blocks.0": "replicated", **plan.rules}).kinds(shapes)
