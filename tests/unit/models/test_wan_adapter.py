"""The Wan adapter against stock diffusers: velocity, guidance, given first frames, text,
latents.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLWan, WanImageToVideoPipeline, WanPipeline, WanTransformer3DModel
from PIL import Image
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megadiff.models.packing import TokenGrid, pack, unpack
from megadiff.models.wan22.adapter import WanAdapter
from megadiff.models.wan22.text import encode
from megadiff.types import Prompt, Sampling
from tests.encoding import encode_prompts

SAMPLING = Sampling(height=64, width=96, num_frames=9, num_inference_steps=6)
GUIDED = dataclasses.replace(SAMPLING, guidance_scale=4.0, guidance_scale_2=3.0)
TEXTS = ["a red circle", "plain blue  star\non white & 猫", ""]


@pytest.fixture(params=["ti2v_5b", "t2v_a14b"])
def adapter(request: pytest.FixtureRequest, tiny_wan: dict[str, Path]) -> WanAdapter:
    return WanAdapter(tiny_wan[request.param])


@pytest.fixture
def two(tiny_wan: dict[str, Path]) -> WanAdapter:
    return WanAdapter(tiny_wan["t2v_a14b"])


@pytest.fixture
def one(tiny_wan: dict[str, Path]) -> WanAdapter:
    return WanAdapter(tiny_wan["ti2v_5b"])


def transformer_of(adapter: WanAdapter, component: str = "transformer") -> WanTransformer3DModel:
    return WanTransformer3DModel.from_pretrained(adapter.model_folder / component)


def text(adapter: WanAdapter) -> dict[str, Tensor]:
    embeds, mask = encode_prompts(adapter, TEXTS)
    negative, negative_mask = encode_prompts(adapter, ["bad"] * len(TEXTS))
    return {
        **{"prompt_embeds": embeds, "prompt_mask": mask},
        **{"negative_prompt_embeds": negative, "negative_prompt_mask": negative_mask},
    }


def latents_of(adapter: WanAdapter, sampling: Sampling = SAMPLING) -> Tensor:
    return torch.randn(
        len(TEXTS), *adapter.latents_shape(sampling), generator=torch.Generator().manual_seed(0)
    )


def test_streams_stay_in_the_weights_dtype(one: WanAdapter) -> None:
    with pytest.raises(
        ValueError,
        match="model.float32_streams=true, but Wan2.1 and Wan2.2's streams .* set it to false",
    ):
        one.keep_streams_in_float32(one.empty_transformer(), torch.bfloat16)


def test_packing_is_in_the_transformers_order() -> None:
    grid = TokenGrid(frames=3, rows=2, columns=5)
    latents = torch.randn(2, 4, 3, 4, 10)
    packed = pack(latents)
    assert packed.shape == (2, grid.num_tokens, 16) and torch.equal(unpack(packed, grid), latents)
    token = 1 * grid.tokens_per_frame + 1 * grid.columns + 3  # frame 1, row 1, column 3
    assert torch.equal(packed[0, token].view(4, 2, 2), latents[0, :, 1, 2:4, 6:8])


@pytest.mark.parametrize("component", ["transformer", "transformer_2"])
@torch.no_grad()
def test_velocity_is_diffusers_with_the_experts_guidance(two: WanAdapter, component: str) -> None:
    transformer, conditioning, latents = transformer_of(two, component), text(two), latents_of(two)
    sigma_B = torch.tensor([0.9, 0.5, 0.25])
    pipeline = WanPipeline.from_pretrained(
        two.model_folder, transformer=None, transformer_2=None, vae=None
    )
    stock = {
        "return_dict": False,
        "timestep": 1000 * sigma_B,
        "hidden_states": unpack(latents, two.grid(GUIDED)),
    }
    positive, negative = (
        transformer(
            encoder_hidden_states=pipeline.encode_prompt(
                texts, do_classifier_free_guidance=False, max_sequence_length=512
            )[0],
            **stock,
        )[0]
        for texts in ([*TEXTS[:1], "plain blue star on white & 猫", ""], ["bad"] * 3)
    )
    scale = 4.0 if component == "transformer" else 3.0
    expected = pack(negative + scale * (positive - negative))
    found = two.velocity(transformer, latents, sigma_B, conditioning, GUIDED, component=component)
    assert (
        found.dtype == torch.float32
        and (found - expected).abs().max() <= 2e-6 * expected.abs().max()
    )
    plain = two.velocity(transformer, latents, sigma_B, conditioning, SAMPLING, component=component)
    assert (plain - pack(positive)).abs().max() <= 2e-6 * positive.abs().max()


@torch.no_grad()
def test_a_given_first_frame_is_clean_and_left_out(one: WanAdapter) -> None:
    """As WanImageToVideoPipeline does for TI2V: the mask sets the frame and its tokens' timestep to
    0.
    """
    transformer, conditioning, grid = transformer_of(one), text(one), one.grid(SAMPLING)
    latents, sigma_B = latents_of(one), torch.tensor([0.9, 0.5, 0.25])
    given, free = latents.split(
        [grid.tokens_per_frame, grid.num_tokens - grid.tokens_per_frame], dim=1
    )
    found = one.velocity(
        transformer, free, sigma_B, conditioning | {"image_latents": given}, SAMPLING
    )

    mask = torch.ones(1, 1, *unpack(latents, grid).shape[2:])
    mask[:, :, 0] = 0
    timestep = torch.stack([(mask[0, 0, :, ::2, ::2] * t).flatten() for t in 1000 * sigma_B])
    embeds = torch.nn.functional.pad(
        conditioning["prompt_embeds"], (0, 0, 0, 512 - conditioning["prompt_embeds"].shape[1])
    )
    (expected,) = transformer(
        hidden_states=unpack(latents, grid),
        timestep=timestep,
        encoder_hidden_states=embeds,
        return_dict=False,
    )
    expected = pack(expected)[:, grid.tokens_per_frame :]
    assert (
        found.shape == free.shape and (found - expected).abs().max() <= 2e-6 * expected.abs().max()
    )
    unlike = one.velocity(transformer, latents, sigma_B, conditioning, SAMPLING)[
        :, grid.tokens_per_frame :
    ]
    assert (found - unlike).abs().max() > 1e-2 * expected.abs().max()


@torch.no_grad()
def test_a_given_first_frame_is_encoded_as_by_the_stock_pipeline(one: WanAdapter) -> None:
    image = torch.randint(
        0, 256, (1, 64, 96, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    pipeline = WanImageToVideoPipeline.from_pretrained(
        one.model_folder,
        transformer=None,
        text_encoder=None,
        image_encoder=None,
        image_processor=None,
        expand_timesteps=True,
    )
    pixels = pipeline.video_processor.preprocess(
        Image.fromarray(image[0].numpy()), height=64, width=96
    )
    sizes = dict(num_channels_latents=48, height=64, width=96, num_frames=9, dtype=torch.float32)
    _, expected, mask = pipeline.prepare_latents(pixels, 1, **sizes)
    with one.image_encoder(dtype=torch.float32, device="cpu") as encode_pixels:
        first = encode_pixels(image)
    assert (first - pack(expected)).abs().max() <= 1e-5
    given = dataclasses.replace(SAMPLING, images=((64, 96),))
    num_drawn, channels = one.latents_shape(given)
    assert first.shape == (1, one.latents_shape(SAMPLING)[0] - num_drawn, channels)
    assert num_drawn == int(pack(mask)[..., 0].sum())  # of all tokens those whose timestep is not 0
    assert one.flops(given, 0) == one.flops(SAMPLING, 0)  # the transformer sees them all


@torch.no_grad()
def test_what_stands_beyond_a_mask_does_not_matter(one: WanAdapter) -> None:
    transformer, conditioning, latents = transformer_of(one), text(one), latents_of(one)
    sigma_B = torch.full((3,), 0.5)
    dirty = conditioning | {
        "prompt_embeds": conditioning["prompt_embeds"]
        + 5 * ~conditioning["prompt_mask"][:, :, None]
    }
    clean, found = (
        one.velocity(transformer, latents, sigma_B, each, SAMPLING)
        for each in (conditioning, dirty)
    )
    assert torch.equal(clean, found)


def test_text_is_that_of_the_stock_pipeline(one: WanAdapter) -> None:
    pipeline = WanPipeline.from_pretrained(one.model_folder, transformer=None, vae=None)
    expected, _ = pipeline.encode_prompt(
        TEXTS, do_classifier_free_guidance=False, max_sequence_length=512
    )
    embeds, mask = encode_prompts(one, TEXTS)
    assert mask.sum(dim=1).tolist()[2] == 1  # the end mark alone
    assert not embeds[~mask].any() and not embeds.requires_grad
    assert (embeds - expected[:, : embeds.shape[1]]).abs().max() <= 1e-6
    alone, _ = encode(TEXTS[:1], pipeline.tokenizer, pipeline.text_encoder)
    assert torch.allclose(alone[0], embeds[0, : alone.shape[1]], atol=1e-6)


def test_too_long_prompts_are_refused(one: WanAdapter) -> None:
    def prompt(words: str, negative: str = " ") -> Prompt:
        return Prompt(text=words, id="0" * 16, negative_text=negative)

    one.check_prompts([prompt("a red circle"), prompt(" ".join(["circle"] * 511))])
    with pytest.raises(
        ValueError, match=r"a prompt has 513 tokens .* the model takes 512 and would cut off"
    ):
        one.check_prompts([prompt("a"), prompt(" ".join(["circle"] * 512))])
    with pytest.raises(ValueError, match="shorten '猫"):
        one.check_prompts([prompt("a", "猫" * 300)])


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {"height": 72},
            r"rollout.height=72 is not a positive multiple of 32 .* set rollout.height=64",
        ),
        ({"width": 0}, "set rollout.width=32"),
        (
            {"num_frames": 8},
            r"num_frames=8 is not 1 \+ a multiple of 4 .*; set rollout.num_frames=9",
        ),
        ({"num_frames": 0}, "set rollout.num_frames=1"),
        ({"true_cfg_scale": 2.0}, "guided by rollout.guidance_scale alone; set rollout.true"),
        ({"guidance_scale": 0.5}, "guidance_scale=0.5 < 1"),
        (
            {"guidance_scale_2": 3.0},
            "by rollout.guidance_scale alone; set rollout.guidance_scale_2=0",
        ),
        (
            {"images": ((64, 96),), "num_frames": 1},
            "the only frame is given .* set rollout.num_frames=5 or more",
        ),
        ({"images": ((64, 96), (64, 96))}, "2 images are given, .* takes 1; give fewer"),
        (
            {"images": ((96, 64),)},
            "image has 64x96 pixels, .* video's 96x64; scale or crop the file, or set",
        ),
    ],
)
def test_impossible_samplings_are_refused(one: WanAdapter, changes: dict, match: str) -> None:
    one.validate(SAMPLING)
    with pytest.raises(ValueError, match=match):
        one.validate(dataclasses.replace(SAMPLING, **changes))


def test_the_second_scale_of_two_experts(two: WanAdapter) -> None:
    two.validate(dataclasses.replace(GUIDED, height=48))
    with pytest.raises(
        ValueError, match="rollout.images=true, but this model .* draws from text alone"
    ):
        two.validate(dataclasses.replace(GUIDED, images=((64, 96),)))
    with pytest.raises(ValueError, match="guidance_scale_2=0.5 < 1"):
        two.validate(dataclasses.replace(GUIDED, guidance_scale_2=0.5))


@torch.no_grad()
def test_videos_and_images_become_normalised_latents(adapter: WanAdapter) -> None:
    pixels = torch.randint(
        0, 256, (2, 9, 64, 96, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    with adapter.image_encoder(dtype=torch.float32, device="cpu") as encode_pixels:
        latents, image = encode_pixels(pixels), encode_pixels(pixels[:, 0])
    assert latents.shape == (2, *adapter.latents_shape(SAMPLING))
    assert image.shape == (2, *adapter.latents_shape(dataclasses.replace(SAMPLING, num_frames=1)))
    vae = AutoencoderKLWan.from_pretrained(adapter.model_folder / "vae")
    raw = vae.encode(pixels.permute(0, 4, 1, 2, 3).float() / 127.5 - 1).latent_dist.mode()
    mean, std = (
        torch.tensor(vae.config[f"latents_{name}"]).view(1, -1, 1, 1, 1) for name in ("mean", "std")
    )
    assert torch.allclose(unpack(latents, adapter.grid(SAMPLING)), (raw - mean) / std, atol=1e-5)
    first = latents[:, : adapter.grid(SAMPLING).tokens_per_frame]
    assert torch.allclose(
        image, first, atol=1e-4
    )  # the VAE is causal: what a given first frame is encoded as


@torch.no_grad()
def test_flops_are_those_counted_in_the_blocks(adapter: WanAdapter) -> None:
    transformer, conditioning, latents = transformer_of(adapter), text(adapter), latents_of(adapter)
    # the fused kernel's products are not counted
    with FlopCounterMode(display=False, depth=5) as counter, sdpa_kernel(SDPBackend.MATH):
        adapter.velocity(transformer, latents, torch.full((3,), 0.5), conditioning, SAMPLING)
    counts = counter.get_flop_counts()
    blocks = [f"WanTransformer3DModel.blocks.{index}" for index in range(2)]
    counted = sum(sum(counts[name].values()) for name in blocks) / len(TEXTS)
    assert adapter.flops(SAMPLING, num_text_tokens=7) == pytest.approx(counted, rel=1e-6)
    assert adapter.flops(GUIDED, num_text_tokens=7) == pytest.approx(2 * counted, rel=1e-6)


def test_flops_of_one_guided_expert(two: WanAdapter) -> None:
    """Of 6 steps with shift 5 three are the high-noise expert's."""
    half = dataclasses.replace(SAMPLING, guidance_scale=2.0, guidance_scale_2=1.0)
    assert two.flops(half, 0) == pytest.approx(1.5 * two.flops(SAMPLING, 0))
