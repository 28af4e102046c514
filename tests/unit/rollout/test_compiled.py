"""Compiled blocks: which sizes get kernels of their own, and rotations that are vllm-omni's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import sympy
import torch
from torch import Tensor, nn
from torch._inductor.choices import InductorChoices
from torch._inductor.runtime.hints import ReductionHint
from vllm_omni.diffusion.layers.rope import RotaryEmbedding, RotaryEmbeddingWan

from megadiff.rollout.worker import compiled as worker_compiled
from megadiff.rollout.worker.compiled import FIXED_SIZES, fix_sizes, fuse_rotary, tune_blocks

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
def compiled(monkeypatch):
    """(a block → the block as vllm-omni compiles it, tuned; the shapes of each variant's inputs;
    of each call the first size that the variant it ran is for).

    A size is a number where it is fixed, and "any" else. Calls are a run's own, of all their rows.
    """
    torch._dynamo.reset()
    variants: list[list[tuple[int | str, ...]]] = []
    ran: list[int | str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[object]) -> Callable[..., object]:
        examples = [
            node.meta["example_value"]
            for node in graph.graph.find_nodes(op="placeholder")
            if not node.name.startswith("l_self_")
        ]
        tensors = [value for value in examples if isinstance(value, Tensor)]
        shapes = [
            tuple(size if isinstance(size, int) else "any" for size in tensor.shape)
            for tensor in tensors
        ]
        variants.append(shapes)
        rows = next(shape[0] for shape in shapes if len(shape) == 3)

        def run(*arguments: object) -> object:
            ran.append(rows)
            return graph(*arguments)

        return run

    def tuned(block: nn.Module) -> nn.Module:
        block.forward = torch.compile(block.forward)
        fix_sizes(Model(block), num_rows=lambda: tuned.rows)
        return block

    monkeypatch.setattr(torch, "compile", partial(torch.compile, dynamic=True, backend=backend))
    yield tuned, variants, ran
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
    tuned, variants, _ = compiled
    block = tuned(kind())
    tuned.rows = 4
    for length in (3, 5, 4, 8, 3):  # as many as rows, and as image tokens
        image, text, tables = inputs(4, 8, length)
        found = block(image, (text,) if kind is TextInTuple else text, tables)
        assert found.shape == (4, 8, WIDTH)
    (shapes,) = variants
    assert set(shapes) == {(4, 8, WIDTH), (8, WIDTH), (4, "any", WIDTH), ("any", WIDTH)}


def test_sizes_beyond_the_first_ones_share_a_variant_for_any(compiled):
    """The others go on to run their own, which torch would find behind the one for any."""
    tuned, variants, ran = compiled
    block = tuned(Block())
    rows = [2, 4, 5, 7, 9, 10, 11]  # torch takes equal sizes for one
    for num_rows in [*rows, *rows]:
        tuned.rows = num_rows  # of the run's whole call
        block(*inputs(num_rows, 8, 3))
    assert len(variants) == FIXED_SIZES + 1
    assert ran == 2 * [*rows[:FIXED_SIZES], "any", "any", "any"]


def test_only_whole_calls_of_a_run_have_a_size_fixed(compiled):
    """Not those of OpenAI requests, nor of samples that still share their noise."""
    tuned, _, ran = compiled
    block = tuned(Block())
    tuned.rows = 0
    block(*inputs(4, 8, 3))
    tuned.rows = 8
    for rows in (2, 4, 8, 4, 8):
        block(*inputs(rows, 8, 3))
    assert ran == ["any", "any", "any", 8, "any", 8]


def test_a_block_that_could_not_be_compiled_stays_as_it_is():
    block = Block()
    fix_sizes(Model(block), num_rows=lambda: 4)
    assert "forward" not in vars(block)


def test_a_stream_that_holds_the_text_keeps_its_length_free(compiled):
    tuned, variants, _ = compiled
    block = tuned(OneStream())
    tuned.rows = 4
    for tokens in (9, 10, 11):
        block(torch.ones(4, tokens, WIDTH))
    assert [shapes[0][:2] for shapes in variants] == [(4, "any")]


@pytest.mark.parametrize(
    ("hint", "size", "is_once"),
    [
        (ReductionHint.INNER, 3072, True),
        (ReductionHint.INNER, 1024, True),
        (ReductionHint.INNER, 128, False),
        (ReductionHint.INNER, 12288, False),
    ],
)
def test_a_blocks_rows_are_read_once_where_they_fit(monkeypatch, hint, size, is_once):
    """By a rule that all replicas share; what is no block's stays torch's."""
    stock = InductorChoices.should_use_persistent_reduction
    monkeypatch.setattr(InductorChoices, "should_use_persistent_reduction", stock)
    monkeypatch.setattr(worker_compiled, "_stock_choice", lambda *_: "stock")
    tune_blocks(nn.ModuleList(), num_rows=lambda: 0)
    features = SimpleNamespace(reduction_numel=sympy.Integer(size), get_reduction_hint=lambda: hint)
    choose = InductorChoices().should_use_persistent_reduction

    with worker_compiled._compiling_blocks():
        assert choose(features, False) is is_once
        assert choose(features, True) == "stock"
        features.reduction_numel = sympy.Symbol("s0")
        assert choose(features, False) == "stock"
    assert choose(features, False) == "stock"


@pytest.mark.parametrize("has_rows", [False, True])
def test_rotations_are_the_stock_layers(has_rows: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x_BTHD = torch.randn(2, 5, 3, 8, generator=generator)
    angle_TP = torch.rand(5, 4, generator=generator) * 6
    cos, sin = angle_TP.cos(), angle_TP.sin()
    if has_rows:
        # the second one is nobody's
        cos, sin = (torch.stack([table, table.flip(0)]) for table in (cos, sin))

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
