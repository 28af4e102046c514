"""Wan's plan: every parameter of the stock transformer once, and every name that vllm-omni has for
it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.tiny_models.wan22 import KINDS
from megadiff.models.registry import build_adapter
from megadiff.models.served_names import served_places
from megadiff.models.wan22.plan import PLAN, SERVED_NAMES


@pytest.fixture(params=KINDS)
def shapes(request: pytest.FixtureRequest, tiny_wan: dict[str, Path]) -> dict[str, tuple[int, ...]]:
    transformer = build_adapter(tiny_wan[request.param]).empty_transformer()
    return {name: tuple(parameter.shape) for name, parameter in transformer.named_parameters()}


def test_every_parameter_has_a_kind(shapes: dict[str, tuple[int, ...]]) -> None:
    kinds = PLAN.kinds(shapes)
    assert (
        kinds["blocks.0.attn2.to_k.weight"] == "column"
        and kinds["blocks.1.ffn.net.2.bias"] == "row"
    )
    assert kinds["blocks.1.attn1.norm_k.weight"] == "across_heads_norm"
    assert {kinds["scale_shift_table"], kinds["blocks.1.scale_shift_table"]} == {"replicated"}
    assert not PLAN.unused_names(shapes)


def test_what_a_rank_holds(shapes: dict[str, tuple[int, ...]]) -> None:
    places = PLAN.placements(shapes, tp=4, tp_rank=1, sequence_parallel=False)
    norm, table = places["blocks.0.attn1.norm_q.weight"], places["blocks.0.scale_shift_table"]
    assert (norm.local_shape, norm.offsets, norm.sum_over_tp) == ((24,), (24,), False)
    assert (table.local_shape, table.sum_over_tp) == ((1, 6, 96), False)
    split = PLAN.placements(shapes, tp=4, tp_rank=1, sequence_parallel=True)
    summed = {name for name, place in split.items() if place.sum_over_tp}
    assert {
        "scale_shift_table",
        "blocks.0.scale_shift_table",
        "patch_embedding.weight",
        "blocks.0.norm2.bias",
    } <= summed
    assert not any("norm_q" in name or "to_q" in name for name in summed)


def test_units_and_lora_targets(shapes: dict[str, tuple[int, ...]]) -> None:
    assert (
        PLAN.is_block("blocks.1")
        and not PLAN.is_block("blocks.1.attn1")
        and not PLAN.is_block("blocks")
    )
    assert PLAN.is_attention("blocks.0.attn2") and PLAN.in_attention("blocks.0.attn2.to_out.0")
    modules = PLAN.lora_modules(shapes)
    assert len(modules) == 2 * (8 + 2) and "blocks.1.attn2.to_out.0" in modules


def test_names_in_vllm_omni(shapes: dict[str, tuple[int, ...]]) -> None:
    """The parameters of vllm-omni's transformer, written out, are all of diffusers' again."""
    served = {
        name.replace(".ffn.net.0.", ".ffn.net_0.")
        .replace(".ffn.net.2.", ".ffn.net_2.")
        .replace(".to_out.0.", ".to_out.")
        for name in shapes
        if not any(f".attn1.to_{x}." in name for x in "qkv")
    }
    served = (served - {"scale_shift_table"}) | {"output_scale_shift_prepare.scale_shift_table"}
    served |= {
        f"blocks.{block}.attn1.to_qkv.{leaf}" for block in range(2) for leaf in ("weight", "bias")
    }
    parameters = [
        f"{component}.{name}"
        for component in ("transformer", "transformer_2")
        for name in sorted(served)
    ]
    places = served_places(parameters, names=SERVED_NAMES)
    assert places.keys() == {
        f"{component}.{name}" for component in ("transformer", "transformer_2") for name in shapes
    }
    table = places["transformer_2.scale_shift_table"]
    assert table.parameter == "transformer_2.output_scale_shift_prepare.scale_shift_table"
    value = places["transformer.blocks.1.attn1.to_v.bias"]
    assert (value.parameter, value.shard, value.num_shards) == (
        "transformer.blocks.1.attn1.to_qkv.bias",
        2,
        3,
    )
