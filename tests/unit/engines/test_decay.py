"""Weight decay acts on the matrices of layers, and on nothing that is added or scales."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megadiff.config.schema import OptimConfig
from megadiff.engines.optimizer import build_adamw
from megadiff.models.registry import build_adapter

FAMILIES = {
    "wan21_t2v_1_3b": {"scale_shift_table", "blocks.0.scale_shift_table"},
    "z_image": {"x_pad_token", "cap_pad_token"},
    "qwen_image": set(),
}


@pytest.mark.parametrize(("family", "added"), FAMILIES.items())
def test_only_matrices_of_layers_decay(
    tiny_folder: Callable[[str], Path], family: str, added: set[str]
) -> None:
    adapter = build_adapter(tiny_folder(family))
    module = adapter.empty_transformer(next(iter(adapter.components)))
    parameters = dict(module.named_parameters())
    names = {id(parameter): name for name, parameter in parameters.items()}
    optimizer = build_adamw(OptimConfig(lr=1e-4, weight_decay=0.1), parameters)

    decaying, others = (
        {names[id(parameter)] for parameter in group["params"]} for group in optimizer.param_groups
    )
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert added <= others and decaying | others == set(parameters)
    assert all(name.endswith("weight") and parameters[name].ndim > 1 for name in decaying)
    # nothing else of several dimensions is left out
    left_out = {name for name in others if parameters[name].ndim > 1}
    kinds = {name.rpartition(".")[2] for name in added}
    assert {name.rpartition(".")[2] for name in left_out} - {"pos_embed"} == kinds
