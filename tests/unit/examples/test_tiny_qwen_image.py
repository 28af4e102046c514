"""The tiny pipeline: whole, reproducible, usable by stock diffusers, and made so that colours can
be learnt.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline
from safetensors.torch import load_file
from transformers import AutoTokenizer

from examples.tiny_models import qwen_image as tiny
from megadiff.diffusion.schedule import qwen_image_sigmas

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def pipeline(tiny_model: Path) -> QwenImagePipeline:
    pipeline = QwenImagePipeline.from_pretrained(tiny_model)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path):
    return AutoTokenizer.from_pretrained(tiny_model / "tokenizer")


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def sample(pipeline: QwenImagePipeline, prompts: list[str], *, seed: int = 0) -> np.ndarray:
    """[B, 32, 32, 3] in [0, 1], each image from the same noise."""
    generators = [torch.Generator().manual_seed(seed) for _ in prompts]
    return pipeline(
        prompt=prompts,
        height=32,
        width=32,
        num_inference_steps=4,
        true_cfg_scale=1.0,
        generator=generators,
        output_type="np",
    ).images


def test_same_seed_same_bytes_and_another_seed_other_weights(tmp_path, tiny_model):
    torch.manual_seed(123)
    before = torch.random.get_rng_state()
    tiny.write_tiny_pipeline(tmp_path / "again")
    assert torch.equal(torch.random.get_rng_state(), before), "the caller's generator moved"
    assert files(tmp_path / "again") == files(tiny_model)
    assert not any(
        str(tmp_path).encode() in content for content in files(tmp_path / "again").values()
    )
    tiny.write_tiny_pipeline(tmp_path / "other", seed=1)
    for part in ("transformer", "text_encoder"):
        name = next((tmp_path / "other" / part).glob("*.safetensors")).relative_to(
            tmp_path / "other"
        )
        assert (tmp_path / "other" / name).read_bytes() != (tiny_model / name).read_bytes()


def test_scheduler_config_is_the_real_one(tiny_model):
    config = json.loads((tiny_model / "scheduler" / "scheduler_config.json").read_text())
    sigmas = qwen_image_sigmas(10, num_tokens=(512 // 16) ** 2, scheduler_config=config)
    golden = [
        1,
        0.92897,
        0.851485,
        0.766624,
        0.673281,
        0.570117,
        0.455497,
        0.3274,
        0.183301,
        0.02,
        0,
    ]
    torch.testing.assert_close(sigmas, torch.tensor(golden), atol=1e-5, rtol=0)


def test_template_prefix_and_words(tokenizer):
    assert len(tokenizer(tiny.TEMPLATE_PREFIX).input_ids) == 34
    for word in tiny.WORDS:
        assert len(tokenizer.tokenize(f" {word}")) == 1, word
    assert len(tokenizer.tokenize("system")) == 1


@pytest.mark.parametrize(
    "text", ["a red picture", "жизнь 你好 🎨 ünïcode", "", "\x00\t \n\n", "x" * 2000]
)
def test_any_prompt_survives_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_template_is_the_one_of_diffusers(pipeline):
    assert pipeline.prompt_template_encode == tiny.TEMPLATE_PREFIX + "{}" + tiny.TEMPLATE_SUFFIX
    assert pipeline.prompt_template_encode_start_idx == tiny.TEMPLATE_PREFIX_TOKENS


@pytest.mark.parametrize("size", tiny.SIZES)
def test_sizes_split_over_tp_and_sp_4(size):
    shape = tiny.SIZES[size]
    assert shape.num_heads % 4 == 0 and sum(shape.rope_axes) == shape.head_dim


def test_stock_diffusers_samples_and_the_prompt_matters(pipeline):
    images = sample(pipeline, ["a red picture", "a blue picture", "a red picture"])
    assert np.array_equal(images[0], images[2])
    assert np.abs(images[0] - images[1]).mean() > 0.05  # with diffusers' own random weights 0.001


def test_images_are_vivid_and_spread_over_the_gamut(pipeline):
    images = np.concatenate([sample(pipeline, ["a red picture"], seed=seed) for seed in range(12)])
    means = images.mean(axis=(1, 2))
    assert means.std(axis=0).min() > 0.1, "images of one colour only"
    assert images.std(axis=(0, 1, 2)).min() > 0.2, "near grey"


def test_decoder_is_monotone_in_the_first_three_channels(pipeline):
    vae = pipeline.vae
    mean, std = (
        torch.tensor(values).view(16, 1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    levels = []
    for value in (-1.0, -0.1, 0.0, 0.1, 1.0):
        latents = torch.zeros(16, 1, 4, 4)
        latents[0] = value
        levels.append(
            vae.decode((latents * std + mean)[None], return_dict=False)[0].mean(dim=(2, 3, 4))[0]
        )
    red, green, blue = torch.stack(levels).T
    assert (red.diff() > 0.1).all() and red[0] < -0.9 < 0.9 < red[-1]
    torch.testing.assert_close(
        torch.stack([green, blue, red[2:3].expand(5)]), torch.zeros(3, 5), atol=1e-5, rtol=0
    )


def test_refuses_to_overwrite_and_leaves_nothing_behind(tmp_path, monkeypatch):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(ValueError, match="taken exists and is not an empty folder"):
        tiny.write_tiny_pipeline(tmp_path / "taken")
    with pytest.raises(ValueError, match="size='huge' is unknown"):
        tiny.write_tiny_pipeline(tmp_path / "out", size="huge")

    def fail(*, seed):
        raise OSError("no space left on device")

    monkeypatch.setattr(tiny, "build_vae", fail)
    with pytest.raises(OSError, match="no space"):
        tiny.write_tiny_pipeline(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.slow
def test_the_tool_writes_bfloat16_and_small(tmp_path):
    out = tmp_path / "deep" / "small"
    arguments = [str(out), "--size", "small", "--dtype", "bfloat16", "--seed", "3"]
    tool = [sys.executable, ROOT / "tools" / "make_tiny_model.py"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([*tool, *arguments], env=environment, check=True, capture_output=True)
    weights = load_file(out / "transformer" / "diffusion_pytorch_model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert sum(tensor.numel() for tensor in weights.values()) > 5_000_000
    again = subprocess.run([*tool, *arguments], env=environment, capture_output=True, text=True)
    assert again.returncode == 2 and "not an empty folder" in again.stderr
