"""LoRA between megadiff's checkpoints, peft and diffusers: the same tensors, the same alpha, the
same outputs.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from megadiff.checkpoint.base_weights import base_fingerprint, tensor_fingerprints
from megadiff.checkpoint.run_folders import progress_record
from megadiff.models.qwen_image.plan import PLAN
from megadiff.tensors.shards import ShardFolder
from megadiff.types import LoraSpec, Progress
from tests.unit.convert.conversions import (
    WEIGHTS,
    changed_adapter,
    contents,
    policy_state,
    refused,
    rewrite,
    run,
    same,
    stored,
    write_checkpoint,
)

RANK, ALPHA = 4, 10.0
PEFT, DIFFUSERS = "adapter_model.safetensors", "pytorch_lora_weights.safetensors"


@pytest.fixture(scope="module")
def spec(tiny_model: Path) -> LoraSpec:
    return LoraSpec(
        rank=RANK, alpha=ALPHA, modules=PLAN.lora_modules(load_file(tiny_model / WEIGHTS))
    )


@pytest.fixture(scope="module")
def adapter(tiny_model: Path, spec: LoraSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA as peft itself saves it, with B that is not zero."""
    folder = tmp_path_factory.mktemp("adapter")
    config = LoraConfig(r=spec.rank, lora_alpha=spec.alpha, target_modules=list(spec.modules))
    model = get_peft_model(transformer(tiny_model), config)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.2, generator=generator)
    model.save_pretrained(folder)
    return folder


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


def transformer(model: Path) -> QwenImageTransformer2DModel:
    return QwenImageTransformer2DModel.from_pretrained(model / "transformer")


def pairs(file: Path) -> dict[str, Tensor]:
    """The tensors under our names."""
    prefix = "base_model.model." if file.name == PEFT else "transformer."
    return {name.removeprefix(prefix): tensor for name, tensor in load_file(file).items()}


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
