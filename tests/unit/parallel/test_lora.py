"""Adapters on one process: their start, their arithmetic and their switch.

Split over ranks: tests/distributed/test_lora.py.
"""

from __future__ import annotations

import math
import re

import peft
import pytest
import torch
from peft.tuners.tuners_utils import check_target_module_exists
from torch import nn
from torch.nn import functional

from megadiff.config.schema import LoraConfig
from megadiff.parallel.lora import (
    Adapters,
    adapt_linears,
    lora_shapes,
    lora_spec,
    start_values,
)
from megadiff.parallel.plan import ParallelPlan, is_lora
from megadiff.types import LoraSpec

PLAN = ParallelPlan(rules={"up": "column", "down": "row"}, lora_targets=("up", "down"))
SHAPES = {"up.weight": (6, 4), "up.bias": (6,), "down.weight": (4, 6)}


def test_the_config_s_adapter() -> None:
    assert lora_spec(LoraConfig(), PLAN, SHAPES) is None
    spec = lora_spec(LoraConfig(rank=3), PLAN, SHAPES)
    assert spec == LoraSpec(rank=3, alpha=3.0, modules=("down", "up")) and spec.scale == 1
    assert lora_spec(LoraConfig(rank=4, alpha=1.0), PLAN, SHAPES).scale == 0.25
    names = ["up.lora_A.weight", "up.lora_B.weight", "down.lora_A.weight", "down.lora_B.weight"]
    assert lora_shapes(spec, SHAPES) == dict(
        zip(names, [(3, 4), (6, 3), (3, 6), (4, 3)], strict=True)
    )
    assert lora_shapes(None, SHAPES) == {}


TARGETS = {  # pattern of lora.targets → the modules of MODULES that peft takes for it, too
    "to_q": {"blocks.0.attn.to_q", "blocks.1.attn.to_q"},
    "attn.to_q": {"blocks.0.attn.to_q", "blocks.1.attn.to_q"},
    "blocks.1.mlp": {"blocks.1.mlp"},
    "to_out.0": {"blocks.0.attn.to_out.0", "blocks.1.attn.to_out.0"},
}
MODULES = [
    f"blocks.{block}.{name}"
    for block in range(2)
    for name in ("attn.to_q", "attn.add_to_q", "attn.to_out.0", "mlp")
]
WIDE = ParallelPlan(rules={"blocks.*": "column"}, blocks="blocks.*", lora_targets=("blocks.*",))


def _modules(**keys: list[str]) -> set[str]:
    spec = lora_spec(LoraConfig(rank=2, **keys), WIDE, [f"{name}.weight" for name in MODULES])
    assert spec is not None and list(spec.modules) == sorted(spec.modules)
    return set(spec.modules)


@pytest.mark.parametrize("target", TARGETS)
def test_targets_are_ends_of_names_as_peft_takes_them(target: str) -> None:
    assert _modules(targets=[target]) == TARGETS[target]
    config = peft.LoraConfig(target_modules=[target])
    by_peft = {name for name in MODULES if check_target_module_exists(config, name)}
    assert by_peft == TARGETS[target]


def test_targets_and_exclude_together() -> None:
    assert _modules() == set(MODULES)
    assert _modules(targets=["to_q", "mlp"], exclude=["blocks.0.*"]) == {
        "blocks.1.attn.to_q",
        "blocks.1.mlp",
    }
    assert _modules(exclude=["attn.*"]) == {"blocks.0.mlp", "blocks.1.mlp"}
    assert _modules(targets=["attn.*to_[qk]"], exclude=["add_to_q"]) == TARGETS["to_q"]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"targets": ["to_q", "to_k"]},
            "lora.targets: 'to_k' is the end of none of the 8 modules that can have LoRA: "
            "attn.add_to_q, attn.to_out.0, attn.to_q, mlp; correct or remove it",
        ),
        ({"targets": ["o_q"]}, "lora.targets: 'o_q' is the end of none"),
        ({"exclude": ["norm"]}, "lora.exclude: 'norm' is the end of none of the 8"),
        (
            {"targets": ["mlp"], "exclude": ["blocks.*"]},
            "lora.exclude=['blocks.*'] leaves none of the 2 modules of lora.targets",
        ),
    ],
)
def test_patterns_without_a_module(keys: dict[str, list[str]], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        _modules(**keys)


def test_the_start_is_that_of_peft_and_the_same_for_a_name_and_seed() -> None:
    a = start_values("up.lora_A.weight", (64, 400), seed=1)
    bound = nn.init.calculate_gain("leaky_relu", math.sqrt(5)) * math.sqrt(
        3 / 400
    )  # kaiming_uniform_, a = √5
    assert bound == pytest.approx(1 / math.sqrt(400))
    assert float(a.abs().max()) == pytest.approx(bound, rel=1e-3) and float(a.abs().max()) <= bound
    assert float(a.mean()) == pytest.approx(0, abs=bound / 50) and float(a.std()) == pytest.approx(
        bound / 3**0.5, rel=0.02
    )
    assert torch.equal(a, start_values("up.lora_A.weight", (64, 400), seed=1))
    assert not torch.equal(a, start_values("up.lora_A.weight", (64, 400), seed=2))
    assert not torch.equal(a, start_values("down.lora_A.weight", (64, 400), seed=1))
    assert not start_values("up.lora_B.weight", (64, 400), seed=1).any()


def test_arithmetic_and_switch() -> None:
    module = nn.Sequential()
    module.up = nn.Linear(4, 6)
    adapters = Adapters(LoraSpec(rank=2, alpha=5.0, modules=("up",)))
    adapt_linears(module, adapters)
    low_rank = {name: p for name, p in module.named_parameters() if is_lora(name)}
    for name, empty in low_rank.items():
        weight = nn.Parameter(torch.randn(empty.shape))
        module.get_submodule(name.rpartition(".")[0]).weight = weight
    x = torch.randn(3, 4)
    up = module.up
    base = functional.linear(x, up.weight, up.bias)
    merged = functional.linear(x, up.weight + 2.5 * up.lora_B.weight @ up.lora_A.weight, up.bias)
    torch.testing.assert_close(module(x), merged)
    with pytest.raises(KeyError), adapters.off():
        assert torch.equal(module(x), base)
        with adapters.off():
            pass
        assert torch.equal(module(x), base)
        raise KeyError
    torch.testing.assert_close(module(x), merged)
    assert [name for name, p in module.named_parameters() if p.requires_grad] == [
        "up.lora_A.weight",
        "up.lora_B.weight",
    ]
