"""Stable Diffusion 3 against stock diffusers: whole trajectories, schedule and texts; its plan and
its table of positions; and what is refused.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megadiff.models.registry import build_adapter, check_model_folder
from megadiff.models.sd3.adapter import CLIP_TOKENS, T5_TOKENS, SD3Adapter
from megadiff.models.sd3.plan import PLAN, SERVED_NAMES
from megadiff.models.served_names import served_places
from megadiff.parallel.mesh import check_heads
from megadiff.planner.model_facts import model_facts
from megadiff.tensors.source_folder import SourceFolder
from megadiff.types import Prompt, Sampling, Tensors
from tests.unit.models.trajectory import trajectory

ASSETS = Path(__file__).parents[3] / "assets"
MEDIUM = ASSETS / "sd35_medium"
LARGE = ASSETS / "sd35_large"
TABLE = "pos_embed.pos_embed"
SAMPLING = Sampling(height=64, width=80, num_inference_steps=5, guidance_scale=4.5)
TEXTS = ["a red circle", "a blue star above the green square " * 6]
NEGATIVE_TEXTS = ["a dark picture " * 9, ""]


@pytest.fixture(scope="module", params=["sd3_medium", "sd35_large", "sd35_medium"])
def folder(request: pytest.FixtureRequest, tiny_folder: Callable[[str], Path]) -> Path:
    return tiny_folder(request.param)


@pytest.fixture(scope="module")
def medium(tiny_folder: Callable[[str], Path]) -> Path:
    return tiny_folder("sd35_medium")


def stock_pipeline(folder: Path) -> StableDiffusion3Pipeline:
    pipeline = StableDiffusion3Pipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def encoded(adapter: SD3Adapter, texts: list[str]) -> Tensors:
    with adapter.prompt_encoder(dtype=torch.float32, device=torch.device("cpu")) as encode:
        return encode(texts)


def conditioning(adapter: SD3Adapter) -> Tensors:
    negative = encoded(adapter, NEGATIVE_TEXTS)
    return encoded(adapter, TEXTS) | {f"negative_{name}": value for name, value in negative.items()}


def noise() -> Tensor:
    return torch.randn(2, 16, 8, 10, generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 4.5])
def test_draws_as_the_stock_pipeline(folder: Path, scale: float) -> None:
    """Time, guidance, schedule, and both kinds of text, of which each matters."""
    adapter = build_adapter(folder)
    assert type(adapter) is SD3Adapter
    stock = stock_pipeline(folder)
    sampling = replace(SAMPLING, guidance_scale=scale)
    texts = conditioning(adapter)
    found = trajectory(adapter, stock.transformer, sampling, texts, noise())
    expected = stock(
        TEXTS,
        negative_prompt=NEGATIVE_TEXTS,
        height=SAMPLING.height,
        width=SAMPLING.width,
        num_inference_steps=SAMPLING.num_inference_steps,
        guidance_scale=scale,
        latents=noise(),
        output_type="latent",
    ).images
    assert (found - expected).abs().max() <= 5e-6 * expected.abs().max()
    assert (expected - noise()).abs().max() > 0.1
    for name in ("prompt_embeds", "pooled_prompt_embeds"):
        without = texts | {name: torch.zeros_like(texts[name])}
        changed = trajectory(adapter, stock.transformer, sampling, without, noise())
        assert (changed - expected).abs().max() > 1e-3, name


@pytest.mark.parametrize("shift", [3.0, 1.0])
@pytest.mark.parametrize("num_steps", [1, 4, 10, 28])
def test_the_schedule_is_the_schedulers(medium: Path, shift: float, num_steps: int) -> None:
    """The end is shifted twice: the class's sigma_min is already. Shifted once, it is another."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(num_steps)
    adapter = SD3Adapter(medium)
    adapter.static_shift = lambda: shift
    sampling = replace(SAMPLING, num_inference_steps=num_steps)
    schedule = adapter.schedule(sampling)
    assert len(schedule) == num_steps + 1 and schedule[0] == 1 and schedule[-1] == 0
    assert (schedule.diff() < 0).all()
    assert (schedule - scheduler.sigmas).abs().max() <= 1e-6

    adapter.last_sigma = lambda num_steps: 1e-3
    once = (adapter.schedule(sampling) - scheduler.sigmas).abs().max()
    assert (once > 1e-3) == (shift != 1 and num_steps > 1)


def test_texts_are_the_stock_pipelines(medium: Path) -> None:
    """Whatever is beside them. CLIP cuts texts off, as everywhere; what T5 would cut is refused."""
    adapter = build_adapter(medium)
    stock = stock_pipeline(medium)
    texts = ["", "猫 🙂", *TEXTS]
    found = encoded(adapter, texts)
    assert found["prompt_embeds"].shape[1] == CLIP_TOKENS + T5_TOKENS == adapter.text_tokens
    assert adapter.num_text_tokens(found) == adapter.text_tokens
    for index, text in enumerate(texts):
        embeds_BTD, _, pooled_BD, _ = stock.encode_prompt(
            text, None, None, do_classifier_free_guidance=False
        )
        assert (found["prompt_embeds"][index] - embeds_BTD[0]).abs().max() <= 1e-5
        assert (found["pooled_prompt_embeds"][index] - pooled_BD[0]).abs().max() <= 1e-5

    blank = adapter.blank_text(1)
    assert {name: value.shape[1:] for name, value in blank.items()} == {
        name: value.shape[1:] for name, value in found.items()
    }
    fits = " ".join(["circle"] * (T5_TOKENS - 1))  # and the mark of the end
    adapter.check_prompts([Prompt(text=fits, id="0" * 16)])
    with pytest.raises(ValueError, match="a prompt has 257 tokens .* the model takes 256"):
        adapter.check_prompts([Prompt(text=f"{fits} circle", id="0" * 16)])


def test_the_table_of_positions_is_the_folders(medium: Path, tmp_path: Path) -> None:
    """Code computes another one than files hold, which was rounded when it was saved."""
    model = shutil.copytree(medium, tmp_path / "model")
    file = model / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    tensors[TABLE] = tensors[TABLE].bfloat16().float()
    save_file(tensors, file, metadata={"format": "pt"})

    adapter = build_adapter(model)
    transformer = adapter.empty_transformer()
    assert TABLE not in dict(transformer.named_parameters())
    source = SourceFolder(model / "transformer")
    source.read_constants(transformer, PLAN.constants)
    assert torch.equal(transformer.get_buffer(TABLE), tensors[TABLE])
    computed = stock_pipeline(medium).transformer.get_buffer(TABLE)
    assert 1e-4 < (transformer.get_buffer(TABLE) - computed).abs().max() < 1e-2

    assert not model_facts(model).problems
    del tensors[TABLE]
    save_file(tensors, file, metadata={"format": "pt"})
    assert any(TABLE in problem for problem in model_facts(model).problems)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(height=72), "height=72 is not a positive multiple of 16"),
        (dict(width=528), "positions for 512 pixels a side; set both to 512 or less"),
        (dict(num_frames=5), "Stable Diffusion 3 and 3.5 makes images"),
        (dict(images=((64, 64),)), r"rollout.images=true, but this model \(Stable Diffusion 3"),
        (
            dict(true_cfg_scale=2.0),
            "guided by rollout.guidance_scale alone; set rollout.true_cfg_scale=1",
        ),
        (dict(guidance_scale=0.0), r"guidance_scale=0\.0 < 1 \(off\)"),
        (dict(guidance_scale_2=3.0), "set rollout.guidance_scale_2=0"),
    ],
)
def test_what_it_cannot_draw_is_refused(medium: Path, change: dict, message: str) -> None:
    adapter = build_adapter(medium)
    adapter.validate(replace(SAMPLING, width=512))
    with pytest.raises(ValueError, match=message):
        adapter.validate(replace(SAMPLING, **change))
    with pytest.raises(ValueError, match="float32_streams=true, but Stable Diffusion 3"):
        adapter.check_float32_streams()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(use_dynamic_shifting=True), "use_dynamic_shifting=True; Stable Diffusion 3"),
        (dict(shift=None), "has shift=None"),
        (dict(num_train_timesteps=0), "num_train_timesteps=0, which is no positive integer"),
    ],
)
def test_another_schedule_is_refused(
    medium: Path, tmp_path: Path, change: dict, message: str
) -> None:
    model = shutil.copytree(medium, tmp_path / "model")
    file = model / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        build_adapter(model).schedule(SAMPLING)


@pytest.mark.parametrize(
    ("full_size", "parameters", "num_heads", "dual"),
    [(MEDIUM, 2.24e9, 24, 13), (LARGE, 8.06e9, 38, 0)],
)
def test_the_plan_at_full_size(
    full_size: Path, parameters: float, num_heads: int, dual: int
) -> None:
    adapter = SD3Adapter(full_size)
    transformer = adapter.empty_transformer()
    shapes = {name: tuple(p.shape) for name, p in transformer.named_parameters()}
    assert sum(p.numel() for p in transformer.parameters()) == pytest.approx(parameters, rel=2e-3)
    kinds = PLAN.kinds(shapes)
    assert kinds["transformer_blocks.0.attn.to_q.weight"] == "column"
    assert kinds["transformer_blocks.0.attn.norm_added_k.weight"] == "head_norm"
    assert sum("attn2.to_q.weight" in name for name in kinds) == dual
    # the last block has no text output: neither its projection nor an MLP of the text
    blocks, width = num_heads, 64 * num_heads
    assert len(PLAN.lora_modules(shapes)) == 12 * blocks - 3 + 4 * dual

    places = PLAN.placements(shapes, tp=2, tp_rank=1, sequence_parallel=False)
    assert places["transformer_blocks.0.attn.add_q_proj.weight"].local_shape == (width // 2, width)
    assert places["transformer_blocks.0.ff.net.2.weight"].local_shape == (width, 2 * width)
    check_heads(adapter.num_heads, sp=1, tp=2)
    with pytest.raises(ValueError, match=f"does not divide the model's {num_heads} attention"):
        check_heads(adapter.num_heads, sp=5, tp=1)


@pytest.mark.slow
@pytest.mark.parametrize("full_size", [MEDIUM, LARGE], ids=lambda path: path.name)
@pytest.mark.parametrize("scale", [1.0, 4.5])
def test_flops_are_those_of_its_operations(full_size: Path, scale: float) -> None:
    """The image's attention to itself alone is a fifth of medium's."""
    adapter = SD3Adapter(full_size)
    sampling = replace(SAMPLING, height=1024, width=1024, guidance_scale=scale)
    texts = adapter.blank_text(1)
    texts |= {f"negative_{name}": value for name, value in texts.items()}
    latents_BLC = torch.empty(1, *adapter.latents_shape(sampling), device="meta")
    transformer = adapter.empty_transformer().to("meta")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        adapter.velocity(transformer, latents_BLC, torch.empty(1), texts, sampling)
    assert adapter.flops(sampling, 1) == pytest.approx(counter.get_total_flops(), rel=2e-3)


def test_names_in_vllm_omni(folder: Path) -> None:
    """The parameters of vllm-omni's transformer, written out, are all of diffusers' again."""
    names = {name for name, _ in build_adapter(folder).empty_transformer().named_parameters()}
    fused = {f"to_{part}": "to_qkv" for part in "qkv"}
    fused |= {f"add_{part}_proj": "add_kv_proj" for part in "qkv"}
    served = {".".join(fused.get(part, part) for part in name.split(".")) for name in names}
    places = served_places([f"transformer.{name}" for name in served], names=SERVED_NAMES)
    assert places.keys() == {f"transformer.{name}" for name in names}
    place = places["transformer.transformer_blocks.0.attn.add_k_proj.weight"]
    assert place.parameter == "transformer.transformer_blocks.0.attn.add_kv_proj.weight"
    assert (place.shard, place.num_shards) == (1, 3)


def test_the_published_layout_loads(medium: Path, tmp_path: Path) -> None:
    """T5 in several files, with the names and keys that are published."""
    published = shutil.copytree(medium, tmp_path / "published")
    stock = stock_pipeline(medium)
    shutil.rmtree(published / "text_encoder_3")
    stock.text_encoder_3.save_pretrained(published / "text_encoder_3", max_shard_size="50KB")
    assert (published / "text_encoder_3" / "model-00001-of-00004.safetensors").is_file()
    for part in ("scheduler/scheduler_config.json", "transformer/config.json", "vae/config.json"):
        values = json.loads((published / part).read_text())
        full_size = json.loads((MEDIUM / part).read_text())
        # every key that the published file has is read, and nothing else is needed
        (published / part).write_text(json.dumps({key: values[key] for key in full_size}))
    shutil.copy(MEDIUM / "model_index.json", published)

    check_model_folder(published)
    assert not model_facts(published).problems
    adapter = build_adapter(published)
    expected = conditioning(build_adapter(medium))
    texts = conditioning(adapter)
    assert all(torch.equal(texts[name], value) for name, value in expected.items())
    shapes = {name: tuple(p.shape) for name, p in adapter.empty_transformer().named_parameters()}
    assert shapes == {name: tuple(p.shape) for name, p in stock.transformer.named_parameters()}
