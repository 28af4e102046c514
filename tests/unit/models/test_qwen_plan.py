"""Qwen-Image's plan against the stock diffusers module."""

from __future__ import annotations

from collections import Counter
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from torch import nn

from megadiff.models.qwen_image.adapter import QwenImageAdapter
from megadiff.models.qwen_image.plan import PLAN


@pytest.fixture(scope="module")
def transformer(tiny_model: Path) -> QwenImageTransformer2DModel:
    return QwenImageTransformer2DModel.from_pretrained(tiny_model / "transformer")


def test_every_parameter_has_a_kind(transformer: nn.Module) -> None:
    kinds = PLAN.kinds(name for name, _ in transformer.named_parameters())
    num_blocks = len(transformer.transformer_blocks)
    modules = Counter({(name.rpartition(".")[0], kind) for name, kind in kinds.items()}).keys()
    count = Counter(kind for _, kind in modules)
    assert (
        count.pop("replicated") == 7
    )  # img_in, txt_norm, txt_in, two of the time embedding, norm_out, proj_out
    assert count == {
        name: size * num_blocks
        for name, size in dict(column=8, row=4, modulation=2, head_norm=4).items()
    }


def test_the_unused_weights_are_those_without_gradient(transformer: nn.Module) -> None:
    config = transformer.config
    output = transformer(
        hidden_states=torch.randn(1, 4, config.in_channels),
        encoder_hidden_states=torch.randn(1, 3, config.joint_attention_dim),
        timestep=torch.tensor([0.5]),
        img_shapes=[[(1, 2, 2)]],
        return_dict=False,
    )[0]
    output.sum().backward()
    without_gradient = {name for name, p in transformer.named_parameters() if p.grad is None}
    assert (
        without_gradient
        and PLAN.unused_names(dict(transformer.named_parameters())) == without_gradient
    )


def test_sites_and_targets_are_modules_of_the_model(transformer: nn.Module) -> None:
    modules = dict(transformer.named_modules())
    blocks = [name for name in modules if PLAN.is_block(name)]
    assert [modules[name] for name in blocks] == list(transformer.transformer_blocks)
    assert [name for name in modules if PLAN.is_attention(name)] == [
        f"{name}.attn" for name in blocks
    ]
    for pattern in PLAN.lora_targets:
        found = [module for name, module in modules.items() if fnmatchcase(name, pattern)]
        assert found and all(type(module) is nn.Linear for module in found), pattern


def test_an_empty_transformer_has_no_memory_but_its_rotary_tables(
    tiny_model: Path, transformer: nn.Module
) -> None:
    empty = QwenImageAdapter(tiny_model).empty_transformer()
    shapes = {name: p.shape for name, p in transformer.named_parameters()}
    assert {name: p.shape for name, p in empty.named_parameters()} == shapes
    assert all(p.is_meta for p in empty.parameters())
    assert torch.equal(empty.pos_embed.pos_freqs, transformer.pos_embed.pos_freqs)


def test_four_ranks_hold_a_quarter_of_the_real_model() -> None:
    with torch.device("meta"):
        block = QwenImageTransformer2DModel(num_layers=1)  # all other sizes are those of Qwen-Image
    shapes = {name: tuple(p.shape) for name, p in block.named_parameters()}
    placements = PLAN.placements(shapes, tp=4, tp_rank=1, sequence_parallel=True)

    def in_block(sizes: dict[str, tuple[int, ...]]) -> int:
        return sum(
            prod(shape)
            for name, shape in sizes.items()
            if PLAN.block_of(name) == "transformer_blocks.0"
        )

    full, local = (
        in_block(shapes),
        in_block({name: place.local_shape for name, place in placements.items()}),
    )
    width, head_dim = 3072, 128
    assert (
        full == 36 * width**2 + 30 * width + 4 * head_dim
    )  # 60 times 0.34 B: with the rest 20.4 B
    assert full / 4 < local < full / 4 * 1.001  # biases of row layers and head norms are whole
