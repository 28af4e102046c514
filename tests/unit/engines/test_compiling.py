"""Which variants of a block torch compiles as calls of several sizes come."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from megadiff.engines.compiling import compile_blocks

WHOLE = 8  # rows of a microbatch


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor) -> Tensor:
        return self.linear(hidden_states) + encoder_hidden_states.mean(1, True) + temb[:, None]


@pytest.fixture
def compiled(monkeypatch):
    """(calls a block: rows, tokens of the text; the number of rows that each variant is for; the
    same of the variant that each call ran).
    """
    torch._dynamo.reset()
    variants: list[int | str] = []
    ran: list[int | str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[object]) -> Callable[..., object]:
        """Note the rows of the image stream, which comes with its name."""
        nodes = {node.name: node for node in graph.graph.find_nodes(op="placeholder")}
        rows = nodes["l_hidden_states_"].meta["example_value"].shape[0]
        rows = rows if isinstance(rows, int) else "any"
        variants.append(rows)

        def run(*arguments: object) -> object:
            ran.append(rows)
            return graph(*arguments)

        return run

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    model = nn.Sequential(Block())
    plan = SimpleNamespace(is_block=lambda name: name == "0", num_streams=2)
    compile_blocks(model, plan, microbatch_size=WHOLE, budget=1.0)

    def call(rows: int, text: int) -> None:
        found = model[0](torch.ones(rows, 5, 4), torch.ones(rows, text, 4), torch.ones(rows, 4))
        assert found.shape == (rows, 5, 4)

    yield call, variants, ran
    torch._dynamo.reset()


def test_whole_microbatches_are_compiled_for_their_size_whatever_the_gate_asked_for(compiled):
    """A size that varies costs the kernels of training their speed."""
    call, variants, ran = compiled
    with torch.no_grad():
        call(WHOLE, 3)
        call(2, 3)  # the gate's second call
        call(WHOLE, 6)
    call(WHOLE, 3)
    call(WHOLE, 7)
    assert variants == [WHOLE, "any", WHOLE]
    assert ran == [WHOLE, "any", WHOLE, WHOLE, WHOLE]


def test_all_other_sizes_share_a_variant(compiled):
    """The rows of an expert are as many as the noise levels make them."""
    call, variants, _ = compiled
    for rows in (WHOLE, 2, 3, 5, 7, WHOLE):
        call(rows, 3)
    assert variants == [WHOLE, "any"]
