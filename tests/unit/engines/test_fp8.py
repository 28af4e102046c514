"""Which linears multiply in FP8, what is refused, and that both sides round to the same bits."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import maybe_mark_dynamic

from examples.tiny_models.families import FAMILIES
from megadiff.config.schema import Config
from megadiff.engines.fp8 import (
    check_fp8_fits,
    check_torchao,
    multiply_in_fp8,
    scaling_config,
)
from megadiff.models.registry import build_adapter
from megadiff.rollout.worker.fp8 import fp8_linear, quantize_rows

ROOT = Path(__file__).parents[3]


def _config(fp8: str) -> Config:
    config = Config()
    config.engine.fp8 = fp8
    return config


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_trainer_and_replica_multiply_the_same_numbers(scaling: str) -> None:
    """Whatever the other numbers of a tensor are, down to 1/14336 of the largest."""
    from torchao.float8 import LinearMMConfig
    from torchao.float8.float8_linear import Float8Linear
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic

    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(64, 96, dtype=torch.bfloat16)
    nn.init.normal_(linear.weight, generator=generator)
    x_BLC = torch.randn(3, 5, 64, generator=generator).bfloat16()
    x_BLC *= torch.logspace(-1, 1, 5)[:, None].bfloat16()  # tokens of unlike sizes

    config = scaling_config(scaling, emulate=False)
    weight_ON, scale_O1 = quantize_rows(linear.weight.detach())
    input_RN, scale_R1 = quantize_rows(x_BLC.flatten(0, 1))
    for tensor, replicas in (
        (linear.weight.detach(), weight_ON.float() * scale_O1),
        (x_BLC.flatten(0, 1), input_RN.float() * scale_R1),
    ):
        trainers = hp_tensor_to_float8_dynamic(
            tensor,
            config.cast_config_input.target_dtype,
            LinearMMConfig(),
            scaling_granularity=config.cast_config_input.scaling_granularity,
            axiswise_dim=-1 if scaling == "rowwise" else None,
            round_scales_to_power_of_2=config.round_scales_to_power_of_2,
        )
        rounded = trainers._data.float() / trainers._scale
        largest = tensor.float().abs().max()
        is_normal = tensor.float().abs() >= largest / 14336
        assert is_normal.float().mean() > 0.99
        assert torch.equal(rounded[is_normal], replicas[is_normal])
        # smaller ones are as near as e4m3's smallest step
        assert (rounded - replicas).abs().max() <= largest * 2**-9 / 224
        assert not torch.equal(replicas, tensor.float())

    # sums differ in their order, and by the smallest numbers
    by_trainer = Float8Linear.from_float(linear, config)(x_BLC)
    by_replica = fp8_linear(x_BLC, weight_ON, scale_O1.T.contiguous(), linear.bias)
    exact = linear(x_BLC).float()
    assert (by_trainer - by_replica).float().norm() < 1e-3 * exact.norm()
    assert 0.02 * exact.norm() < (by_trainer - exact).norm() < 0.06 * exact.norm()


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_compiled_forward_and_backward_are_exact_for_every_length(scaling: str) -> None:
    """One graph for all, lengths that FP8 products take only with padding among them."""
    from torchao.float8 import convert_to_float8_training

    def results(call: Callable[[Tensor], Tensor], x_BLC: Tensor) -> list[Tensor]:
        module.zero_grad()
        x_BLC = x_BLC.clone().requires_grad_()
        maybe_mark_dynamic(x_BLC, 1)
        y_BLC = call(x_BLC)
        y_BLC.float().square().sum().backward()
        return [y_BLC.detach(), x_BLC.grad, *(p.grad for p in module.parameters())]

    layers = (nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    module = nn.Sequential(*layers).bfloat16()
    convert_to_float8_training(module, config=scaling_config(scaling, emulate=False))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(module, backend="aot_eager")
    for length in (5, 7, 16):
        x_BLC = torch.randn(2, length, 64).bfloat16()
        pairs = zip(results(compiled, x_BLC), results(module, x_BLC), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs), length
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_familys_blocks_keep_their_parameters(family: str, tmp_path: Path) -> None:
    """All linears of the plan become torchao's, and no other; names, shapes and order stay."""
    from torchao.float8.float8_linear import Float8Linear

    FAMILIES[family](tmp_path / "model")
    adapter = build_adapter(tmp_path / "model")
    for component in adapter.components:
        model = adapter.empty_transformer(component)
        before = {name: id(parameter) for name, parameter in model.named_parameters()}
        multiply_in_fp8(model, adapter.plan, scaling="tensorwise", device=torch.device("cuda"))
        assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
        assert list(before) == [name for name, _ in model.named_parameters()]

        replaced = [name for name, m in model.named_modules() if isinstance(m, Float8Linear)]
        wanted = adapter.plan.fp8_weights(before)
        assert sorted(f"{name}.weight" for name in replaced) == sorted(wanted) != []


def test_sizes_that_fp8_does_not_take_are_named(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = build_adapter(tiny_model)
    check_fp8_fits(_config("rowwise"), adapter)

    # the smallest change that makes sizes odd: the rule itself
    monkeypatch.setattr("megadiff.engines.fp8.FP8_MULTIPLE", 48)
    check_fp8_fits(_config("none"), adapter)
    with pytest.raises(
        ValueError, match=r"multiples of 48, .*to_q.weight \d+ × \d+.*set engine.fp8=none"
    ):
        check_fp8_fits(_config("tensorwise"), adapter)


@pytest.mark.slow
def test_the_shipped_models_fit() -> None:
    folders = [path.parent for path in (ROOT / "assets").glob("*/model_index.json")]
    for folder in [*folders, ROOT / "assets" / "bagel"]:
        check_fp8_fits(_config("tensorwise"), build_adapter(folder))


def test_without_torchao_or_with_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    check_torchao(_config("tensorwise"))
    monkeypatch.setattr("megadiff.engines.fp8.TORCHAO", ("0.1.0",))
    with pytest.raises(ValueError, match=r"torchao 0\.18\.\d is none of 0\.1\.0"):
        check_torchao(_config("tensorwise"))

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_torchao(_config("none"))
    with pytest.raises(ValueError, match="needs torchao, which is not installed; install torchao"):
        check_torchao(_config("tensorwise"))


def test_targets_are_attention_and_mlps_of_the_blocks() -> None:
    """Not what sees one token a sample, such as modulations: a third of the weights, and none of
    the time.
    """
    adapter = build_adapter(ROOT / "assets" / "qwen_image")
    names = [name for name, _ in adapter.empty_transformer().named_parameters()]
    targets = adapter.plan.fp8_weights(names)
    assert len(targets) == 60 * 12
    assert {
        name.split(".", 2)[2] for name in targets if name.startswith("transformer_blocks.7.")
    } == {
        *(
            f"attn.{name}.weight"
            for name in ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")
        ),
        *(f"attn.{name}.weight" for name in ("to_out.0", "to_add_out")),
        *(
            f"{stream}_mlp.net.{name}.weight"
            for stream in ("img", "txt")
            for name in ("0.proj", "2")
        ),
    }
