"""Every weight of a served pipeline has one diffusers name and one place, and back."""

from __future__ import annotations

import pytest
import torch

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


def test_two_places_for_one_name_are_an_error() -> None:
    with pytest.raises(ValueError, match="a.x.weight"):
        served_places(["a.x.weight", "a.y.weight"], names={"y": ("x",)})
