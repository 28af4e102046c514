"""Z-Image against stock diffusers: velocity, schedule, whole trajectories and texts; its plan; and
which models are refused.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline
from diffusers.pipelines.z_image.pipeline_z_image import get_default_z_image_sigmas
from torch import Tensor
from transformers import Qwen3ForCausalLM

from examples.tiny_models.z_image import BASE_SHIFT, TURBO_SHIFT, write_tiny_pipeline
from megadiff.cli.main import main
from megadiff.models.registry import build_adapter, check_model_folder
from megadiff.models.served_names import served_places
from megadiff.models.z_image.adapter import FILL, TEMPLATE_TOKENS, ZImageAdapter, filled
from megadiff.models.z_image.plan import PLAN, SERVED_NAMES
from megadiff.parallel.mesh import check_heads
from megadiff.types import Prompt, Sampling
from tests.encoding import encode_prompts
from tests.unit.models.trajectory import trajectory

ROOT = Path(__file__).parents[3]
FULL_SIZE = ROOT / "assets" / "z_image"
SAMPLING = Sampling(height=64, width=80, num_inference_steps=5, guidance_scale=4.0)
TEXTS = ["a red circle", "a blue star above the green square " * 6]
NEGATIVE_TEXTS = ["a dark picture " * 9, ""]


@pytest.fixture(scope="module")
def folder(tiny_folder: Callable[[str], Path]) -> Path:
    return tiny_folder("z_image")


@pytest.fixture(scope="module")
def stock(folder: Path) -> ZImagePipeline:
    pipeline = ZImagePipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture
def adapter(folder: Path) -> ZImageAdapter:
    adapter = build_adapter(folder)
    assert type(adapter) is ZImageAdapter
    return adapter


def conditioning(adapter: ZImageAdapter) -> dict[str, Tensor]:
    """Both sides' texts fill up to different lengths, in different rows."""
    names = ("prompt_embeds", "prompt_mask")
    positive = dict(zip(names, encode_prompts(adapter, TEXTS), strict=True))
    negative = dict(zip(names, encode_prompts(adapter, NEGATIVE_TEXTS), strict=True))
    for side in (positive, negative):
        assert len({filled(int(length)) for length in side["prompt_mask"].sum(1)}) == 2
    return positive | {f"negative_{name}": value for name, value in negative.items()}


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_draws_as_the_stock_pipeline(
    adapter: ZImageAdapter, stock: ZImagePipeline, scale: float
) -> None:
    """Signs, time, lists, padding and guidance: the stock scale is one less, and off at 0."""
    generator = torch.Generator().manual_seed(0)
    latents_BCHW = torch.randn(2, 16, 8, 10, generator=generator)
    sampling = replace(SAMPLING, guidance_scale=scale)
    texts = conditioning(adapter)
    found = trajectory(adapter, stock.transformer, sampling, texts, latents_BCHW)
    expected = stock(
        list(TEXTS),
        negative_prompt=list(NEGATIVE_TEXTS),
        height=SAMPLING.height,
        width=SAMPLING.width,
        num_inference_steps=SAMPLING.num_inference_steps,
        guidance_scale=scale - 1,
        latents=latents_BCHW.clone(),
        output_type="latent",
    ).images
    assert (found - expected).abs().max() <= 2e-5
    assert (expected - latents_BCHW).abs().max() > 0.1


@pytest.mark.parametrize("shift", [BASE_SHIFT, TURBO_SHIFT])
@pytest.mark.parametrize("num_steps", [1, 8, 28])
def test_the_schedule_is_the_checkpoints(folder: Path, shift: float, num_steps: int) -> None:
    """That of diffusers 0.40. In 0.38 and in vllm-omni N steps are N − 1 and one from 0 to 0."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(sigmas=get_default_z_image_sigmas(num_steps))
    adapter = ZImageAdapter(folder)
    adapter.static_shift = lambda: shift
    schedule = adapter.schedule(replace(SAMPLING, num_inference_steps=num_steps))
    assert len(schedule) == num_steps + 1 and schedule[0] == 1 and schedule[-1] == 0
    assert (schedule.diff() < 0).all()
    assert (schedule - scheduler.sigmas).abs().max() <= 1e-6


def test_texts_are_the_stock_pipelines(adapter: ZImageAdapter, stock: ZImagePipeline) -> None:
    """Whatever is beside them; a prompt's limit counts the template."""
    texts = ["", "猫 🙂", *TEXTS]
    embeds_BTD, mask_BT = encode_prompts(adapter, texts)
    for text, row_TD, mask_T in zip(texts, embeds_BTD, mask_BT, strict=True):
        (expected_TD,), _ = stock.encode_prompt(text, do_classifier_free_guidance=False)
        assert int(mask_T.sum()) == len(expected_TD)
        assert (row_TD[mask_T] - expected_TD).abs().max() <= 1e-5
    assert int(mask_BT[0].sum()) == TEMPLATE_TOKENS

    fits = " circle" * adapter.max_prompt_tokens
    adapter.check_prompts([Prompt(text=fits, id="0" * 16)])
    assert int(encode_prompts(adapter, [fits])[1].sum()) == 512
    with pytest.raises(ValueError, match="a prompt has 505 tokens .* the model takes 504"):
        adapter.check_prompts([Prompt(text=f"{fits} circle", id="0" * 16)])


def test_tokens_are_counted_filled_up(adapter: ZImageAdapter) -> None:
    count = adapter.token_count(SAMPLING, 33)
    assert (count.image, count.text) == (FILL, 2 * FILL)
    full_size = ZImageAdapter(FULL_SIZE)
    sampling = replace(SAMPLING, height=1024, width=1024, guidance_scale=1.0)
    # 2 operations for each of 6.15 B weights and token, and a quarter more for attention
    flops = full_size.flops(sampling, 128)
    assert 1 < flops / (2 * 6.15e9 * (4096 + 128)) < 1.3
    assert full_size.flops(replace(sampling, guidance_scale=4.0), 128) == 2 * flops


def test_turbo_is_trained_only_when_asked_for(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turbo = tmp_path / "turbo"
    write_tiny_pipeline(turbo, shift=TURBO_SHIFT)
    monkeypatch.chdir(ROOT)  # where the config's prompts are

    def dry_run(model: Path, *arguments: str) -> int:
        places = (f"model.path={model}", f"run.dir={tmp_path}")
        return main(["train", "configs/shapes/z_image.yaml", *places, *arguments, "--dry-run"])

    assert dry_run(folder) == 0
    capsys.readouterr()
    assert dry_run(turbo) == 2
    refusal = capsys.readouterr().err
    assert "shift=3.0, so this is Z-Image-Turbo" in refusal
    assert dry_run(turbo, refusal.split()[-1]) == 0


def test_the_plan_at_full_size() -> None:
    adapter = ZImageAdapter(FULL_SIZE)
    transformer = adapter.empty_transformer()
    shapes = {name: tuple(p.shape) for name, p in transformer.named_parameters()}
    assert 6.1e9 < sum(p.numel() for p in transformer.parameters()) < 6.2e9
    kinds = PLAN.kinds(shapes)
    assert kinds["layers.29.feed_forward.w3.weight"] == "column"
    assert kinds["noise_refiner.1.attention.to_q.weight"] == "replicated"
    assert not PLAN.unused_names(shapes)
    modules = PLAN.lora_modules(shapes)
    assert len(modules) == 30 * 7 and not any("refiner" in module for module in modules)

    places = PLAN.placements(shapes, tp=2, tp_rank=1, sequence_parallel=False)
    assert places["layers.0.attention.to_q.weight"].local_shape == (1920, 3840)
    assert places["layers.0.feed_forward.w2.weight"].local_shape == (3840, 5120)
    assert not places["noise_refiner.0.attention.to_q.weight"].sum_over_tp
    check_heads(adapter.num_heads, sp=3, tp=2)
    with pytest.raises(ValueError, match=r"1\*4 = 4 does not divide the model's 30 attention"):
        check_heads(adapter.num_heads, sp=1, tp=4)


def test_names_in_vllm_omni(adapter: ZImageAdapter) -> None:
    """The parameters of vllm-omni's transformer, written out, are all of diffusers' again."""
    names = {name for name, _ in adapter.empty_transformer().named_parameters()}
    fused = {"to_q": "to_qkv", "to_k": "to_qkv", "to_v": "to_qkv", "w1": "w13", "w3": "w13"}
    served = {".".join(fused.get(part, part) for part in name.split(".")) for name in names}
    places = served_places([f"transformer.{name}" for name in served], names=SERVED_NAMES)
    assert places.keys() == {f"transformer.{name}" for name in names}
    place = places["transformer.context_refiner.0.feed_forward.w3.weight"]
    assert place.parameter == "transformer.context_refiner.0.feed_forward.w13.weight"
    assert (place.shard, place.num_shards) == (1, 2)


def test_the_published_layout_loads(folder: Path, stock: ZImagePipeline, tmp_path: Path) -> None:
    """Transformer and text encoder in several files, with the names and keys that are published."""
    published = tmp_path / "published"
    shutil.copytree(folder, published)
    text_encoder = Qwen3ForCausalLM.from_pretrained(folder / "text_encoder")
    for name, network in (("transformer", stock.transformer), ("text_encoder", text_encoder)):
        shutil.rmtree(published / name)
        network.save_pretrained(published / name, max_shard_size="300KB")
        assert len(list((published / name).glob("*-00001-of-0*.safetensors"))) == 1
    for part in ("scheduler/scheduler_config.json", "transformer/config.json"):
        values = json.loads((published / part).read_text())
        full_size = json.loads((FULL_SIZE / part).read_text())
        # every key that the published file has is read, and nothing else is needed
        kept = {key: values[key] for key in full_size}
        (published / part).write_text(json.dumps(kept))
    index = json.loads((published / "model_index.json").read_text())
    assert index.keys() == json.loads((FULL_SIZE / "model_index.json").read_text()).keys()
    assert index["text_encoder"] == ["transformers", "Qwen3Model"]

    check_model_folder(published)
    adapter = build_adapter(published)
    assert torch.equal(encode_prompts(adapter, TEXTS)[0], encode_prompts(adapter, TEXTS)[0])
    shapes = {name: tuple(p.shape) for name, p in adapter.empty_transformer().named_parameters()}
    assert shapes == {name: tuple(p.shape) for name, p in stock.transformer.named_parameters()}


def test_converted_there_and_back_it_is_the_same_pipeline(
    folder: Path, stock: ZImagePipeline, tmp_path: Path
) -> None:
    """Through two tensor-parallel ranks; diffusers loads what comes out."""
    for source, destination, options in (
        (folder, tmp_path / "tp2", ["--to", "megatron", "--tp", "2"]),
        (tmp_path / "tp2", tmp_path / "back", ["--base", str(folder)]),
    ):
        assert main(["convert", str(source), str(destination), *options]) == 0
    weights = ZImagePipeline.from_pretrained(tmp_path / "back").transformer.state_dict()
    for name, weight in stock.transformer.state_dict().items():
        assert torch.equal(weights[name], weight), name
