"""Every weight of a served pipeline has one diffusers name and one place, and back."""

from __future__ import annotations

import pytest
import torch

from megadiff.models.bagel.plan import served_names
from megadiff.models.qwen_image.plan import SERVED_NAMES
from megadiff.models.served_names import served_places, served_view

BLOCK = "transformer.transformer_blocks.0"
SERVED = [
    f"{BLOCK}.attn.{name}.weight" for name in ("to_qkv", "add_kv_proj", "to_out", "to_add_out")
] + [
    f"{BLOCK}.img_mlp.net.2.bias",
    "transformer.img_in.weight",
]


def test_fused_weights_split_into_their_rows_and_cover_them_all() -> None:
    parameters = {name: torch.randn(6, 4) for name in SERVED}
    places = served_places(SERVED, names=SERVED_NAMES)
    names = (
        "to_q",
        "to_k",
        "to_v",
        "add_q_proj",
        "add_k_proj",
        "add_v_proj",
        "to_out.0",
        "to_add_out",
    )
    assert set(places) == {f"{BLOCK}.attn.{name}.weight" for name in names} | set(SERVED[-2:])
    views = {name: served_view(place, parameters=parameters) for name, place in places.items()}
    parts = [views[f"{BLOCK}.attn.{name}.weight"] for name in ("to_q", "to_k", "to_v")]
    assert torch.equal(torch.cat(parts), parameters[f"{BLOCK}.attn.to_qkv.weight"])
    assert sum(view.numel() for view in views.values()) == sum(
        tensor.numel() for tensor in parameters.values()
    )


def test_suffixes_match_whole_module_names_only() -> None:
    names = {"proj": ("proj.0",)}
    assert set(served_places(["a.proj.weight", "a.out_proj.weight"], names=names)) == {
        "a.proj.0.weight",
        "a.out_proj.weight",
    }


def test_unequal_shards_and_renamed_leaves() -> None:
    """BAGEL: four heads of queries for each two of keys and values; norms of two experts."""
    names = served_names(4, 2)
    served = ["a.self_attn.qkv_proj.gen_exp.bias", "a.self_attn.q_norm.gen_weight"]
    served += ["a.self_attn.q_norm.weight", "norm.gen_weight"]
    parameters = {name: torch.arange(16) for name in served}
    places = served_places(served, names=names)
    views = {
        name: served_view(place, parameters=parameters).tolist() for name, place in places.items()
    }
    assert views == {
        "a.self_attn.q_proj_moe_gen.bias": list(range(8)),
        "a.self_attn.k_proj_moe_gen.bias": list(range(8, 12)),
        "a.self_attn.v_proj_moe_gen.bias": list(range(12, 16)),
        "a.self_attn.q_norm_moe_gen.weight": list(range(16)),
        "a.self_attn.q_norm.weight": list(range(16)),
        "norm_moe_gen.weight": list(range(16)),
    }


def test_two_places_for_one_name_are_an_error() -> None:
    with pytest.raises(ValueError, match="a.x.weight"):
        served_places(["a.x.weight", "a.y.weight"], names={"y": ("x",)})
