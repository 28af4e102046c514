"""LoRA between megadiff's checkpoints, peft and diffusers: the same tensors, the same alpha, the
same outputs.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import QwenImagePipeline
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from megadiff.checkpoint.base_weights import base_fingerprint, tensor_fingerprints
from megadiff.checkpoint.run_folders import progress_record
from megadiff.tensors.shards import ShardFolder
from megadiff.types import LoraSpec, Progress
from tests.unit.convert.conversions import (
    ALPHA,
    PEFT,
    RANK,
    WEIGHTS,
    changed_adapter,
    contents,
    pairs,
    refused,
    run,
    same,
    stored,
    transformer,
    write_checkpoint,
)

DIFFUSERS = "pytorch_lora_weights.safetensors"


@pytest.fixture(scope="module")
def checkpoint(
    adapter: Path, tiny_model: Path, spec: LoraSpec, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The same LoRA as a checkpoint of ours, with moments."""
    tensors = {
        f"{kind}/transformer.{name}": factor * tensor
        for kind, factor in (("model", 1.0), ("optim/exp_avg", 0.5), ("optim/exp_avg_sq", 0.25))
        for name, tensor in pairs(adapter / PEFT).items()
    }
    return write_checkpoint(
        tmp_path_factory.mktemp("run") / "step_000007", tensors, tiny_model, lora=spec
    )


@torch.no_grad()
def velocity(module: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return module(
        hidden_states=torch.randn(1, 9, 64, generator=generator),
        timestep=torch.tensor([0.5]),
        encoder_hidden_states=torch.randn(1, 5, 64, generator=generator),
        encoder_hidden_states_mask=torch.ones(1, 5, dtype=torch.bool),
        img_shapes=[[(1, 3, 3)]],
        return_dict=False,
    )[0]


def by_peft(model: Path, adapter: Path) -> Tensor:
    return velocity(PeftModel.from_pretrained(transformer(model), adapter).eval())


def by_diffusers(model: Path, adapter: Path) -> Tensor:
    pipeline = QwenImagePipeline.from_pretrained(model, text_encoder=None, tokenizer=None, vae=None)
    pipeline.load_lora_weights(adapter)
    return velocity(pipeline.transformer)


@pytest.mark.parametrize("source", ["adapter", "checkpoint", "megatron", "fsdp"])
def test_one_folder_is_loaded_by_peft_and_by_diffusers(
    tiny_model: Path, adapter: Path, checkpoint: Path, tmp_path: Path, source: str
) -> None:
    given = {"adapter": adapter}.get(source, checkpoint)
    if source in ("megatron", "fsdp"):
        ranks = ("--tp", 4) if source == "megatron" else ("--dp", 3)
        assert (
            run(
                adapter, tmp_path / source, "--to", source, *ranks, "--base", tiny_model, "--verify"
            )
            == 0
        )
        given = tmp_path / source
    assert run(given, tmp_path / "out", "--to", "peft", "--verify") == 0
    expected = pairs(adapter / PEFT)
    assert same(pairs(tmp_path / "out" / PEFT), expected) and same(
        pairs(tmp_path / "out" / DIFFUSERS), expected
    )
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (RANK, ALPHA)
    base, right = velocity(transformer(tiny_model)), by_peft(tiny_model, adapter)
    assert (right - base).abs().max() > 1e-2
    assert torch.equal(by_peft(tiny_model, tmp_path / "out"), right)
    assert torch.equal(by_diffusers(tiny_model, tmp_path / "out"), right)


@pytest.mark.parametrize("has_alpha", [True, False])
def test_a_file_that_diffusers_saved(
    tiny_model: Path, adapter: Path, tmp_path: Path, has_alpha: bool
) -> None:
    """Without metadata, alpha is the rank."""
    config = {"r": RANK, "lora_alpha": ALPHA, "target_modules": ["to_q"]} if has_alpha else None
    QwenImagePipeline.save_lora_weights(
        tmp_path / "saved",
        transformer_lora_layers=pairs(adapter / PEFT),
        transformer_lora_adapter_metadata=config,
    )
    renamed = shutil.copyfile(tmp_path / "saved" / DIFFUSERS, tmp_path / "some lora.safetensors")
    for number, source in enumerate((tmp_path / "saved", renamed)):
        out, back = tmp_path / f"out{number}", tmp_path / f"back{number}"
        assert run(source, out, "--to", "peft", "--base", tiny_model) == 0
        assert json.loads((out / "adapter_config.json").read_text())["lora_alpha"] == (
            ALPHA if has_alpha else RANK
        )
        assert run(out, back) == 0
        assert list(contents(back)) == [DIFFUSERS]
        assert same(pairs(back / DIFFUSERS), pairs(tmp_path / "saved" / DIFFUSERS))
        assert torch.equal(by_diffusers(tiny_model, back), by_peft(tiny_model, out))


@pytest.mark.parametrize("source", ["adapter", "checkpoint"])
def test_merged_is_what_peft_merges(
    tiny_model: Path, adapter: Path, checkpoint: Path, tmp_path: Path, source: str
) -> None:
    given = [adapter, "--base", tiny_model] if source == "adapter" else [checkpoint]
    assert run(*given, tmp_path / "out", "--to", "merged", "--verify") == 0
    merged = PeftModel.from_pretrained(transformer(tiny_model), adapter).merge_and_unload()
    base, held = load_file(tiny_model / WEIGHTS), load_file(tmp_path / "out" / WEIGHTS)
    for name, tensor in merged.state_dict().items():
        torch.testing.assert_close(held[name], tensor, rtol=0, atol=1e-6)
    assert (
        sum(not torch.equal(base[name], held[name]) for name in base)
        == len(pairs(adapter / PEFT)) // 2
    )
    others = {name: digest for name, digest in contents(tiny_model).items() if name != str(WEIGHTS)}
    assert others.items() <= contents(tmp_path / "out").items()
    torch.testing.assert_close(
        velocity(transformer(tmp_path / "out")), by_peft(tiny_model, adapter), rtol=0, atol=1e-5
    )


def test_a_merge_into_bfloat16_is_rounded_once(
    tiny_model: Path, checkpoint: Path, tmp_path: Path
) -> None:
    for dtype in ("float32", "bfloat16"):
        assert run(checkpoint, tmp_path / dtype, "--to", "merged", "--dtype", dtype) == 0
    wide, half = (load_file(tmp_path / dtype / WEIGHTS) for dtype in ("float32", "bfloat16"))
    assert same({name: tensor.bfloat16() for name, tensor in wide.items()}, half)
    assert run(tiny_model, tmp_path / "base", "--dtype", "bfloat16") == 0
    assert run(checkpoint, tmp_path / "out", "--to", "merged", "--base", tmp_path / "base") == 0
    rounded = load_file(tmp_path / "base" / WEIGHTS)
    held, delta = load_file(tmp_path / "out" / WEIGHTS), pairs_delta(pairs_of(checkpoint))
    for name, tensor in rounded.items():
        right = tensor.float() + delta.get(name, 0)
        assert held[name].dtype == torch.bfloat16
        torch.testing.assert_close(held[name].float(), right, rtol=2**-8, atol=1e-6)


def pairs_of(checkpoint: Path) -> dict[str, Tensor]:
    prefix = "model/transformer."
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in stored(checkpoint).items()
        if name.startswith(prefix)
    }


def pairs_delta(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    modules = {name.rsplit(".", 2)[0] for name in tensors}
    scale = ALPHA / RANK
    return {
        f"{m}.weight": scale * tensors[f"{m}.lora_B.weight"] @ tensors[f"{m}.lora_A.weight"]
        for m in modules
    }


@pytest.mark.parametrize(("to", "flag", "ranks"), [("megatron", "--tp", 2), ("fsdp", "--dp", 3)])
def test_a_checkpoint_of_lora_is_cut_anew_with_its_moments(
    checkpoint: Path, spec: LoraSpec, tmp_path: Path, to: str, flag: str, ranks: int
) -> None:
    assert run(checkpoint, tmp_path / "other", "--to", to, flag, ranks, "--verify") == 0
    assert same(stored(tmp_path / "other"), stored(checkpoint))
    values = ShardFolder(tmp_path / "other").values
    assert values == {
        "optimizer_steps": {"transformer": 7},
        "lora": {"rank": RANK, "alpha": ALPHA, "modules": list(spec.modules)},
    }


def test_float32_pairs_become_bfloat16_when_asked(checkpoint: Path, tmp_path: Path) -> None:
    assert run(checkpoint, tmp_path / "out", "--to", "peft", "--dtype", "bfloat16", "--verify") == 0
    with safe_open(tmp_path / "out" / PEFT, "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}


def test_rslora_keeps_its_scale(adapter: Path, tiny_model: Path, tmp_path: Path) -> None:
    folder = changed_adapter(adapter, tmp_path / "adapter", use_rslora=True)
    assert run(folder, tmp_path / "out", "--to", "peft") == 0
    assert torch.equal(by_peft(tiny_model, folder), by_peft(tiny_model, tmp_path / "out"))


def test_a_model_with_a_lora_beside_it_is_a_model(
    adapter: Path, tiny_model: Path, model: Path, tmp_path: Path
) -> None:
    """As diffusers' save_lora_weights(MODEL) leaves it."""
    shutil.copy(adapter / PEFT, model / "pytorch_lora_weights.safetensors")
    assert run(model, tmp_path / "ranks", "--to", "megatron", "--tp", "2") == 0
    assert run(tmp_path / "ranks", tmp_path / "back", "--base", tiny_model) == 0
    assert contents(tmp_path / "back" / "transformer") == contents(tiny_model / "transformer")


def test_a_peft_folder_may_have_a_config_beside_it(adapter: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(adapter, tmp_path / "adapter")
    (folder / "config.json").write_text("{}")
    assert run(folder, tmp_path / "out", "--to", "peft") == 0
    assert contents(tmp_path / "out").keys() >= contents(adapter).keys() - {"README.md"}


def test_a_checkpoints_lora_is_merged_into_the_base_that_it_belongs_to(
    tiny_model: Path, checkpoint: Path, tmp_path: Path, capsys, caplog
) -> None:
    """Weights × 1.05 at the same place have the same names, shapes and sizes."""
    base = shutil.copytree(tiny_model, tmp_path / "base")
    files = {"transformer": [base / WEIGHTS]}
    known = {"path": str(base), "fingerprint": base_fingerprint([tensor_fingerprints(files)])}
    saved = shutil.copytree(checkpoint, tmp_path / "saved")
    (saved / "config.yaml").write_text(json.dumps({"model": {"path": str(base)}}))
    (saved / "progress.json").unlink()
    record = progress_record(saved, Progress(step=7, base=known))
    (saved / "progress.json").write_bytes(record)
    assert run(saved, tmp_path / "cut", "--to", "fsdp", "--dp", 3) == 0
    for source in (saved, tmp_path / "cut"):
        assert run(source, tmp_path / "right", "--to", "merged", "--force") == 0
    scaled = {name: 1.05 * tensor for name, tensor in load_file(base / WEIGHTS).items()}
    save_file(scaled, base / WEIGHTS)
    for source in (saved, tmp_path / "cut"):
        error = refused(capsys, source, tmp_path / "out", "--to", "merged")
        assert f"was trained over the weights of {base}" in error and known["fingerprint"] in error
        assert "name the model folder that you mean with --base" in error
    assert run(saved, tmp_path / "out", "--to", "merged", "--base", base) == 0
    assert "they are taken, as --base names them" in caplog.text
