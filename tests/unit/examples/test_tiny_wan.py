"""The tiny Wan folders: whole, the same every time, and such that prompts, timesteps and experts
matter.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline, WanPipeline
from safetensors.torch import load_file

from examples.tiny_models.wan22 import HEAD_DIM, build_tokenizer, write_tiny_pipeline

TEXT_KINDS = ("ti2v_5b", "t2v_a14b", "t2v_1_3b")

ROOT = Path(__file__).parents[3]


def weights(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("kind", TEXT_KINDS)
def test_the_same_bytes_every_time(tiny_wan: dict[str, Path], tmp_path: Path, kind: str) -> None:
    write_tiny_pipeline(tmp_path / "again", kind=kind)
    assert weights(tmp_path / "again") == weights(tiny_wan[kind])
    write_tiny_pipeline(tmp_path / "other", kind=kind, seed=5)
    assert weights(tmp_path / "other") != weights(tiny_wan[kind])


@pytest.mark.parametrize("kind", TEXT_KINDS)
def test_it_loads_and_draws_in_diffusers(tiny_wan: dict[str, Path], kind: str) -> None:
    pipeline = DiffusionPipeline.from_pretrained(tiny_wan[kind])
    assert type(pipeline) is WanPipeline and (pipeline.transformer_2 is not None) == (
        kind == "t2v_a14b"
    )
    pipeline.set_progress_bar_config(disable=True)

    def drawn(prompt: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        size = {"height": 32, "width": 64, "num_frames": 5, "num_inference_steps": 3}
        return pipeline(
            prompt, guidance_scale=1.0, generator=generator, output_type="latent", **size
        ).frames

    red, blue = drawn("a red circle"), drawn("two blue stars")
    assert torch.isfinite(red).all() and (red - blue).abs().mean() > 0.005 * red.abs().mean()


def test_the_experts_differ(tiny_wan: dict[str, Path]) -> None:
    files = [
        tiny_wan["t2v_a14b"] / name / "diffusion_pytorch_model.safetensors"
        for name in ("transformer", "transformer_2")
    ]
    high, low = (load_file(file) for file in files)
    assert high.keys() == low.keys() and not torch.equal(
        high["proj_out.weight"], low["proj_out.weight"]
    )
    assert 200_000 < sum(tensor.numel() for tensor in high.values()) < 500_000
    assert HEAD_DIM % 6 == 0


def test_no_prompt_has_unknown_tokens() -> None:
    tokenizer = build_tokenizer()
    assert tokenizer.tokenize("a red circle") == ["▁a", "▁red", "▁circle"]
    for text in ("Ünïcode 猫 🙂", "\x00\t", "</s> <unk>x", ""):
        ids = tokenizer(text).input_ids
        assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.unk_token_id not in tokenizer("Ünïcode 猫 🙂 \x00").input_ids


def test_bfloat16(tmp_path: Path) -> None:
    write_tiny_pipeline(tmp_path / "model", dtype="bfloat16")
    for component in ("transformer", "vae", "text_encoder"):
        (file,) = (tmp_path / "model" / component).glob("*.safetensors")
        assert {tensor.dtype for tensor in load_file(file).values()} == {torch.bfloat16}


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="kind='a14b' is unknown; choose one of"):
        write_tiny_pipeline(tmp_path / "model", kind="a14b")
    with pytest.raises(ValueError, match="dtype='int8' is unknown"):
        write_tiny_pipeline(tmp_path / "model", dtype="int8")
    assert not list(tmp_path.iterdir())


def test_the_tool_writes_each_family(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    spec = importlib.util.spec_from_file_location(
        "make_tiny_model", ROOT / "tools" / "make_tiny_model.py"
    )
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.main([str(tmp_path / "model"), "--family", "wan22_t2v_a14b"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "model")
    assert (tmp_path / "model" / "transformer_2" / "config.json").is_file()
    assert tool.main([str(tmp_path / "other"), "--family", "wan22_ti2v_5b", "--size", "small"]) == 2
    assert "wan22_ti2v_5b has one tiny size; leave it out" in capsys.readouterr().err
