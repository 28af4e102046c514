"""Compiled blocks: which sizes get kernels of their own, and rotations that are vllm-omni's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from vllm_omni.diffusion.layers.rope import RotaryEmbedding, RotaryEmbeddingWan

from megadiff.rollout.worker.compiled import FIXED_SIZES, fix_sizes, fuse_rotary

WIDTH = 6


class Block(nn.Module):
    """A block of both streams, with a table of rotations for each."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, hidden_states: Tensor, encoder_hidden_states: Tensor, tables: tuple[Tensor, Tensor]
    ) -> Tensor:
        text = encoder_hidden_states * tables[1]
        return self.linear(hidden_states) * tables[0] + text.mean(1, keepdim=True)


class OneStream(nn.Module):
    """A block whose only stream holds text and image."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


class Model(nn.Module):
    _repeated_blocks = ("Block", "OneStream", "TextInTuple")

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block])


@pytest.fixture
def compiled():
    """(a block → the block as vllm-omni compiles it, tuned; the shapes of each variant's inputs).

    A size is a number where it is fixed, and "any" else.
    """
    torch._dynamo.reset()
    variants: list[list[tuple[int | str, ...]]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[object]) -> torch.fx.GraphModule:
        examples = [
            node.meta["example_value"]
            for node in graph.graph.find_nodes(op="placeholder")
            if not node.name.startswith("l_self_")
        ]
        tensors = [value for value in examples if isinstance(value, Tensor)]
        variants.append(
            [tuple(size if isinstance(size, int) else "any" for size in t.shape) for t in tensors]
        )
        return graph

    def tuned(block: nn.Module) -> nn.Module:
        block.forward = torch.compile(block.forward, dynamic=True, backend=backend)
        fix_sizes(Model(block))
        return block

    yield tuned, variants
    torch._dynamo.reset()


class TextInTuple(Block):
    """A block as SD3.5's."""

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: tuple[Tensor],
        tables: tuple[Tensor, ...],
    ) -> Tensor:
        return super().forward(hidden_states, encoder_hidden_states[0], tables)


def inputs(rows: int, image: int, text: int) -> list[object]:
    tables = torch.ones(image, WIDTH), torch.ones(text, WIDTH)
    return [torch.ones(rows, image, WIDTH), torch.ones(rows, text, WIDTH), tables]


@pytest.mark.parametrize("kind", [Block, TextInTuple])
def test_everything_but_the_texts_length_is_fixed(compiled, kind):
    tuned, variants = compiled
    block = tuned(kind())
    for length in (3, 5, 4, 8, 3):  # as many as rows, and as image tokens
        image, text, tables = inputs(4, 8, length)
        found = block(image, (text,) if kind is TextInTuple else text, tables)
        assert found.shape == (4, 8, WIDTH)
    (shapes,) = variants
    assert set(shapes) == {(4, 8, WIDTH), (8, WIDTH), (4, "any", WIDTH), ("any", WIDTH)}


def test_sizes_beyond_the_first_ones_share_a_variant_for_any(compiled):
    tuned, variants = compiled
    block = tuned(Block())
    rows = range(2, 2 + FIXED_SIZES + 3)
    for num_rows in [*rows, *rows]:
        block(*inputs(num_rows, 8, 3))
    found = [next(shape[0] for shape in shapes if len(shape) == 3) for shapes in variants]
    assert found == [*rows[:FIXED_SIZES], "any"]


def test_a_stream_that_holds_the_text_keeps_its_length_free(compiled):
    tuned, variants = compiled
    block = tuned(OneStream())
    for tokens in (9, 10, 11):
        block(torch.ones(4, tokens, WIDTH))
    assert [shapes[0][:2] for shapes in variants] == [(4, "any")]


@pytest.mark.parametrize("has_rows", [False, True])
def test_rotations_are_the_stock_layers(has_rows: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x_BTHD = torch.randn(2, 5, 3, 8, generator=generator)
    angle_TP = torch.rand(5, 4, generator=generator) * 6
    cos, sin = angle_TP.cos(), angle_TP.sin()
    if has_rows:
        cos, sin = (table.expand(2, 5, 4) for table in (cos, sin))

    model = nn.ModuleList([RotaryEmbedding(is_neox_style=False)])
    stock = model[0]._forward_method
    expected = model[0](x_BTHD, cos, sin)
    fuse_rotary(model)
    assert model[0]._forward_method != stock
    torch.testing.assert_close(model[0](x_BTHD, cos, sin), expected, rtol=1e-6, atol=1e-6)

    rounded = model[0](x_BTHD.bfloat16(), cos, sin)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), expected, rtol=2**-7, atol=2**-7)


def test_rotary_layers_of_other_layouts_stay_as_they_are() -> None:
    model = nn.ModuleList([RotaryEmbedding(is_neox_style=True), RotaryEmbeddingWan()])
    before = [layer._forward_method for layer in model]
    fuse_rotary(model)
    assert [layer._forward_method for layer in model] == before
