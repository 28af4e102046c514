"""A model of two trained components converts as one of one: every format holds both, and every bit
is where it was.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor, nn

from megadiff.models.wan22.plan import PLAN
from megadiff.parallel.lora import lora_shapes
from megadiff.tensors.shards import ShardFolder
from megadiff.types import LoraSpec
from tests.unit.convert.conversions import (
    contents,
    refused,
    rewrite,
    run,
    same,
    stored,
    write_checkpoint,
)

EXPERTS = ("transformer", "transformer_2")
FILE = "diffusion_pytorch_model.safetensors"
PEFT, DIFFUSERS = "adapter_model.safetensors", "pytorch_lora_weights.safetensors"
LAYOUTS = [
    ("megatron", "--tp", 1),
    ("megatron", "--tp", 2),
    ("megatron", "--tp", 4),
    ("fsdp", "--dp", 3),
]


@pytest.fixture(scope="module")
def model(tiny_wan: dict[str, Path]) -> Path:
    return tiny_wan["t2v_a14b"]


@pytest.fixture(scope="module")
def lora(model: Path) -> LoraSpec:
    return LoraSpec(rank=4, alpha=10.0, modules=PLAN.lora_modules(shapes(model)))


@pytest.fixture(scope="module")
def checkpoint(model: Path, lora: LoraSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LoRA of both experts, each its own."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"{kind}/{expert}.{name}": 0.2 * torch.randn(shape, generator=generator)
        for kind in ("model", "optim/exp_avg")
        for expert in EXPERTS
        for name, shape in lora_shapes(lora, shapes(model)).items()
    }
    return write_checkpoint(
        tmp_path_factory.mktemp("run") / "step_000007", tensors, model, lora=lora
    )


def shapes(model: Path) -> dict[str, tuple[int, ...]]:
    return {
        name: tuple(tensor.shape)
        for name, tensor in load_file(model / "transformer" / FILE).items()
    }


def weights(model: Path) -> dict[str, Tensor]:
    """Of both experts, under the names that checkpoints and the wire have."""
    return {
        f"{each}.{name}": tensor
        for each in EXPERTS
        for name, tensor in load_file(model / each / FILE).items()
    }


@torch.no_grad()
def velocity(module: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return module(
        hidden_states=torch.randn(1, 16, 2, 4, 4, generator=generator),
        timestep=torch.tensor([700.0]),
        encoder_hidden_states=torch.randn(1, 5, 32, generator=generator),
        return_dict=False,
    )[0]


@pytest.mark.parametrize(("to", "flag", "ranks"), LAYOUTS)
def test_a_pipeline_of_two_experts_comes_back_as_the_same_files(
    model: Path, tmp_path: Path, to: str, flag: str, ranks: int
) -> None:
    shards, back, before = tmp_path / "shards", tmp_path / "back", contents(model)
    assert run(model, shards, "--to", to, flag, ranks, "--verify") == 0
    assert same(stored(shards), {f"model/{name}": t for name, t in weights(model).items()})
    assert run(shards, back, "--verify") == 0
    assert contents(back) == contents(model) == before


def test_what_both_experts_learned_is_exported_and_loads(model: Path, tmp_path: Path) -> None:
    state = {
        f"{kind}/{name}": factor * tensor + (1e-3 if name.startswith("transformer_2.") else 0)
        for kind, factor in (("model", 1.5), ("average", 0.5), ("optim/exp_avg", 0.1))
        for name, tensor in weights(model).items()
    }
    saved = write_checkpoint(tmp_path / "run" / "checkpoints" / "step_000007", state, model)
    assert run(saved, tmp_path / "tp4", "--to", "megatron", "--tp", 4, "--verify") == 0
    assert run(tmp_path / "tp4", tmp_path / "dp2", "--to", "fsdp", "--dp", 2) == 0
    assert same(stored(tmp_path / "dp2"), state)
    for kind, options in (("average", ()), ("model", ("--raw",))):
        assert run(tmp_path / "run", tmp_path / kind, "--verify", *options) == 0
        assert all(
            torch.equal(tensor, state[f"{kind}/{name}"])
            for name, tensor in weights(tmp_path / kind).items()
        )
    pipeline = WanPipeline.from_pretrained(tmp_path / "model")
    for expert in EXPERTS:
        for name, tensor in getattr(pipeline, expert).state_dict().items():
            assert torch.equal(tensor, state[f"model/{expert}.{name}"]), (expert, name)
    assert pipeline.config.boundary_ratio == 0.875


def test_a_dtype_is_for_both(model: Path, tmp_path: Path) -> None:
    assert run(model, tmp_path / "half", "--dtype", "bfloat16", "--verify") == 0
    whole, half = weights(model), weights(tmp_path / "half")
    assert all(torch.equal(tensor, whole[name].bfloat16()) for name, tensor in half.items())


def test_each_experts_lora_has_a_folder_that_diffusers_and_peft_load(
    model: Path, checkpoint: Path, lora: LoraSpec, tmp_path: Path
) -> None:
    assert run(checkpoint, tmp_path / "out", "--to", "peft", "--verify") == 0
    assert run(checkpoint, tmp_path / "merged", "--to", "merged", "--verify") == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [*EXPERTS]
    pipeline = WanPipeline.from_pretrained(model, text_encoder=None, tokenizer=None, vae=None)
    pipeline.load_lora_weights(tmp_path / "out" / "transformer")
    pipeline.load_lora_weights(tmp_path / "out" / "transformer_2", load_into_transformer_2=True)
    for expert in EXPERTS:
        base = WanTransformer3DModel.from_pretrained(model / expert)
        plain = velocity(base)
        merged = velocity(WanTransformer3DModel.from_pretrained(tmp_path / "merged" / expert))
        adapted = velocity(PeftModel.from_pretrained(base, tmp_path / "out" / expert).eval())
        assert (merged - plain).abs().max() > 1e-2
        torch.testing.assert_close(adapted, merged, rtol=0, atol=1e-5)
        torch.testing.assert_close(velocity(getattr(pipeline, expert)), merged, rtol=0, atol=1e-5)
        config = json.loads((tmp_path / "out" / expert / "adapter_config.json").read_text())
        assert (config["r"], config["lora_alpha"]) == (4, 10.0)
        assert config["base_model_name_or_path"] == str(model / expert)


@pytest.mark.slow
def test_lora_of_both_goes_around_through_every_format(
    model: Path, checkpoint: Path, lora: LoraSpec, tmp_path: Path
) -> None:
    for to in ("peft", "diffusers"):
        assert run(checkpoint, tmp_path / to, "--to", to) == 0
        again = tmp_path / f"{to} again"
        assert (
            run(tmp_path / to, again, "--to", "megatron", "--tp", 2, "--base", model, "--verify")
            == 0
        )
        held = stored(again)
        assert held.keys() == {name for name in stored(checkpoint) if name.startswith("model/")}
        assert all(torch.equal(tensor, stored(checkpoint)[name]) for name, tensor in held.items())
        assert ShardFolder(again).values["lora"] == {
            "rank": 4,
            "alpha": 10.0,
            "modules": list(lora.modules),
        }


def test_one_experts_lora_merges_into_that_one(
    model: Path, checkpoint: Path, tmp_path: Path, capsys
) -> None:
    assert run(checkpoint, tmp_path / "out", "--to", "peft") == 0
    shutil.rmtree(tmp_path / "out" / "transformer")
    assert run(tmp_path / "out", tmp_path / "merged", "--to", "merged", "--base", model) == 0
    base, merged = weights(model), weights(tmp_path / "merged")
    changed = {name.partition(".")[0] for name in base if not torch.equal(base[name], merged[name])}
    assert changed == {"transformer_2"}
    assert run(tmp_path / "out", tmp_path / "again", "--to", "peft", "--base", model) == 0
    assert [path.name for path in (tmp_path / "again").iterdir()] == ["transformer_2"]
    alone = (
        tmp_path / "out" / "transformer_2"
    )  # its folder by itself, or a file in it, is of that component too
    for number, source in enumerate((alone, alone / DIFFUSERS)):
        assert run(source, tmp_path / f"one{number}", "--to", "merged", "--base", model) == 0
        assert contents(tmp_path / f"one{number}") == contents(tmp_path / "merged")
    error = refused(
        capsys, tmp_path / "out", tmp_path / "no", "--to", "fsdp", "--dp", 2, "--base", model
    )
    assert "has no LoRA of transformer, and a checkpoint holds those of all components" in error


@pytest.mark.parametrize("to", ["merged", "peft", "diffusers"])
def test_a_lora_that_may_be_of_either_expert_is_refused(
    model: Path, checkpoint: Path, tmp_path: Path, capsys, to: str
) -> None:
    assert run(checkpoint, tmp_path / "out", "--to", "peft") == 0
    alone = (tmp_path / "out" / "transformer_2").rename(tmp_path / "some lora")
    for source in (alone, alone / DIFFUSERS):
        error = refused(capsys, source, tmp_path / "no", "--to", to, "--base", model)
        assert (
            f"may be of any of the 2 components of {model}: give --base {model}/transformer or "
            in error
        )
    assert run(alone, tmp_path / "chosen", "--to", to, "--base", model / "transformer_2") == 0


def test_experts_that_do_not_belong_together_are_refused(
    model: Path, tiny_wan: dict[str, Path], checkpoint: Path, tmp_path: Path, capsys
) -> None:
    assert run(checkpoint, tmp_path / "out", "--to", "peft") == 0
    out, no = tmp_path / "out", tmp_path / "no"
    small = tiny_wan["ti2v_5b"]
    error = refused(capsys, out, no, "--to", "merged", "--base", small)
    assert f"is of transformer_2, but {small} has transformer" in error
    config = out / "transformer_2" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": 3}))
    error = refused(capsys, out, no, "--to", "merged", "--base", model)
    assert (
        "the LoRA of transformer_2 (rank 4, alpha 3, " in error
        and "is unlike that of transformer (rank 4, alpha 10" in error
    )
    alone = shutil.copyfile(model / "transformer_2" / FILE, tmp_path / "weights.safetensors")
    error = refused(capsys, alone, no, "--base", model)
    assert (
        f"{model} has 2 components" in error
        and f"--base {model}/transformer or {model}/transformer_2" in error
    )
    assert run(alone, tmp_path / "alone", "--base", model / "transformer_2") == 0
    assert contents(tmp_path / "alone") == contents(model / "transformer_2")


def test_an_expert_that_is_missing_is_named(model: Path, tmp_path: Path, capsys) -> None:
    state = {
        f"model/{name}": tensor
        for name, tensor in weights(model).items()
        if name.startswith("transformer.")
    }
    saved = write_checkpoint(tmp_path / "checkpoint", state, model)
    error = refused(capsys, saved, tmp_path / "no")
    assert "model: transformer_2.blocks.0" in error and "is missing" in error
    whole = shutil.copytree(model, tmp_path / "model")
    file = whole / "transformer_2" / FILE
    name = min(load_file(file))
    rewrite(file, lambda tensors: tensors.pop(name))
    error = refused(capsys, whole, tmp_path / "no")
    assert f"{name} is missing" in error and "transformer_2/config.json" in error
