"""A LoRA that does not fit its model, or would lose a setting, is refused with the reason."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.unit.convert.conversions import (
    PEFT,
    RANK,
    WEIGHTS,
    changed_adapter,
    pairs,
    policy_state,
    refused,
    rewrite,
    run,
    write_checkpoint,
)


def first(tensors: dict[str, Tensor], part: str) -> str:
    return next(name for name in sorted(tensors) if part in name)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda held: held.pop(first(held, "lora_B")), "attn.add_k_proj.lora_B.weight is missing"),
        (
            lambda held: held.update({first(held, "lora_A"): torch.ones(3, 128)}),
            "has several ranks: 3 of ",
        ),
        (
            lambda held: held.update(
                {
                    name: torch.empty(tuple(0 if size == RANK else size for size in tensor.shape))
                    for name, tensor in held.items()
                }
            ),
            "has rank 0, so its matrices hold no number",
        ),
        (
            lambda held: held.update(other=torch.ones(3)),
            "other is neither base_model.model.MODULE.lora_A.weight nor",
        ),
        (
            lambda held: held.update({first(held, "lora_A"): torch.ones(4, 96)}),
            "add_k_proj is for a weight (128, 96), the model's is (128, 128)",
        ),
        (
            lambda held: held.update(
                {f"base_model.model.nowhere.lora_{p}.weight": torch.ones(4, 4) for p in "AB"}
            ),
            "nowhere is no linear layer of the model",
        ),
    ],
)
def test_tensors_that_are_no_lora_of_the_model(
    adapter: Path, tiny_model: Path, tmp_path: Path, capsys, change: Callable, text: str
) -> None:
    folder = shutil.copytree(adapter, tmp_path / "adapter")
    rewrite(folder / PEFT, change)
    error = refused(capsys, folder, tmp_path / "out", "--to", "merged", "--base", tiny_model)
    assert text in error and PEFT in error


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"r": 8}, "r=8, but the tensors have rank 4"),
        ({"lora_alpha": 0}, "lora_alpha=0 is no positive number"),
        ({"lora_alpha": float("nan")}, "lora_alpha=nan is no positive number"),
        ({"lora_alpha": float("inf")}, "lora_alpha=inf is no positive number"),
        ({"lora_alpha": 1e308}, "lora_alpha=1e+308 is no positive number"),
        ({"lora_alpha": 10**400}, "lora_alpha=1000000000000000"),
        ({"lora_alpha": True}, "lora_alpha=True is no positive number"),
        ({"use_rslora": "false"}, "use_rslora='false' must be true or false"),
        ({"use_dora": True}, "use_dora=True is more than A and B"),
        ({"alpha_pattern": {"to_q": 3}}, "alpha_pattern={'to_q': 3} is more than A and B"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4': such an adap"),
    ],
)
def test_settings_that_would_be_lost_are_refused(
    adapter: Path, tmp_path: Path, capsys, changes, text: str
) -> None:
    folder = changed_adapter(adapter, tmp_path / "adapter", **changes)
    error = refused(capsys, folder, tmp_path / "out", "--to", "peft")
    assert text in error and "adapter_config.json" in error


def test_what_needs_a_base_or_other_modules_says_so(
    adapter: Path, tiny_model: Path, tmp_path: Path, capsys
) -> None:
    for target in (("--to", "merged"), ("--to", "megatron", "--tp", 2)):
        assert "is a LoRA without a model; name the model folder with --base" in refused(
            capsys, adapter, tmp_path / "out", *target
        )
    tensors = {name: tensor for name, tensor in pairs(adapter / PEFT).items() if "to_q" in name}
    num_outputs, num_inputs = load_file(tiny_model / WEIGHTS)["proj_out.weight"].shape
    tensors["proj_out.lora_A.weight"] = torch.ones(RANK, num_inputs)
    tensors["proj_out.lora_B.weight"] = torch.ones(num_outputs, RANK)
    save_file(
        {f"transformer.{name}": tensor for name, tensor in tensors.items()},
        tmp_path / "q.safetensors",
    )
    error = refused(
        capsys,
        tmp_path / "q.safetensors",
        tmp_path / "out",
        "--to",
        "fsdp",
        "--dp",
        2,
        "--base",
        tiny_model,
    )
    assert (
        "is a LoRA of 3 modules, 1 of which no engine wraps: ['proj_out']; --to merged takes"
        in error
    )
    assert (
        run(tmp_path / "q.safetensors", tmp_path / "out", "--to", "merged", "--base", tiny_model)
        == 0
    )


def test_whole_weights_are_not_taken_for_lora(tiny_model: Path, tmp_path: Path, capsys) -> None:
    folder = write_checkpoint(
        tmp_path / "checkpoint", policy_state(tiny_model, {"model": 1.0}), tiny_model
    )
    for to in ("peft", "merged"):
        assert "holds whole weights and no LoRA" in refused(
            capsys, folder, tmp_path / "out", "--to", to
        )


@pytest.mark.parametrize("kind", ["alpha", "lora", "base"])
def test_a_merged_model_that_is_not_finite_is_refused(
    tiny_model: Path, adapter: Path, tmp_path: Path, capsys, kind: str
) -> None:
    """An alpha that float32 holds may still be too much for the sum."""
    changes = {"lora_alpha": 3e38} if kind == "alpha" else {}
    folder = changed_adapter(adapter, tmp_path / "adapter", **changes)
    base = shutil.copytree(tiny_model, tmp_path / "base")
    name = "transformer_blocks.0.attn.to_q"
    if kind == "alpha":
        larger = {key: 100 * tensor for key, tensor in load_file(folder / PEFT).items()}
        save_file(larger, folder / PEFT)
    elif kind == "lora":
        spoil(folder / PEFT, f"base_model.model.{name}.lora_A.weight")
    else:
        spoil(base / WEIGHTS, f"{name}.weight")
    error = refused(capsys, folder, tmp_path / "out", "--to", "merged", "--base", base)
    assert "with the LoRA added is NaN or infinite in" in error and name in error
    assert not (tmp_path / "out").exists()


def test_weights_that_are_not_finite_are_mentioned(
    tiny_model: Path, tmp_path: Path, caplog
) -> None:
    base = shutil.copytree(tiny_model, tmp_path / "base")
    spoil(base / WEIGHTS, "proj_out.weight")
    assert run(base, tmp_path / "out", "--verify") == 0
    assert "base holds NaN or infinity in 1 tensors" in caplog.text
    assert "transformer.proj_out.weight" in caplog.text
    caplog.clear()
    assert run(tiny_model, tmp_path / "good", "--dtype", "bfloat16") == 0
    assert "NaN" not in caplog.text


def spoil(file: Path, name: str) -> None:
    """Put one NaN into a tensor."""
    rewrite(file, lambda tensors: tensors[name].view(-1)[-1].fill_(float("nan")))
