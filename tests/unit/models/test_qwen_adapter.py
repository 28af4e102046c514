"""The Qwen-Image adapter against stock diffusers: same velocity for any padding and guidance; same
text.
"""

from __future__ import annotations

import gc
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    QwenImageImg2ImgPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from diffusers.models.modeling_outputs import AutoencoderKLOutput
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift
from PIL import Image
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration

from megadiff.models.qwen_image.adapter import QwenImageAdapter
from megadiff.types import Sampling
from tests.encoding import encode_prompts

SAMPLING = Sampling(height=64, width=48, num_inference_steps=10)
LENGTHS = [5, 9, 7]
DIM = 64


@pytest.fixture(scope="module")
def transformer(tiny_model: Path) -> QwenImageTransformer2DModel:
    model = QwenImageTransformer2DModel.from_pretrained(tiny_model / "transformer")
    assert type(model).forward.__wrapped__.__module__.startswith("diffusers."), (
        "another library replaced the reference"
    )
    return model.requires_grad_(False)


@pytest.fixture
def adapter(tiny_model: Path) -> QwenImageAdapter:
    return QwenImageAdapter(tiny_model)


def _inputs(seed: int = 0) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """Latents, sigmas, and each sample's own prompt and negative prompt, without padding."""
    generator = torch.Generator().manual_seed(seed)
    latents_BLC = torch.randn(3, 12, 64, generator=generator)
    prompts = [torch.randn(length, DIM, generator=generator) for length in LENGTHS]
    negatives = [torch.randn(length, DIM, generator=generator) for length in (2, 4, 3)]
    return latents_BLC, torch.tensor([1.0, 0.77, 0.31]), prompts, negatives


def _padded(prompts: list[Tensor], width: int) -> tuple[Tensor, Tensor]:
    """Padding holds noise: it must not matter."""
    embeds_BTD = torch.full((len(prompts), width, DIM), 3.0)
    mask_BT = torch.zeros(len(prompts), width, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        embeds_BTD[row, : len(prompt)], mask_BT[row, : len(prompt)] = prompt, True
    return embeds_BTD, mask_BT


def _conditioning(
    prompts: list[Tensor], negatives: list[Tensor], width: int = 9
) -> dict[str, Tensor]:
    names = ("prompt_embeds", "prompt_mask", "negative_prompt_embeds", "negative_prompt_mask")
    return dict(zip(names, (*_padded(prompts, width), *_padded(negatives, width)), strict=True))


def _stock(
    transformer: QwenImageTransformer2DModel, latents_LC: Tensor, sigma: Tensor, prompt_TD: Tensor
) -> Tensor:
    """One sample alone, without mask or padding, as diffusers' own pipeline calls the
    transformer.
    """
    return transformer(
        hidden_states=latents_LC[None],
        timestep=sigma[
            None
        ],  # not sigma · 1000 / 1000 as the pipeline: the rule is one rounding, see velocity()
        encoder_hidden_states=prompt_TD[None],
        img_shapes=[[(1, 4, 3)]],
        return_dict=False,
    )[0][0]


def _error(found_LC: Tensor, expected_LC: Tensor) -> float:
    """Largest difference, relative to the largest velocity."""
    return float((found_LC - expected_LC).abs().max() / expected_LC.abs().max())


def _stock_guided(transformer, latents_LC, sigma, prompt_TD, negative_TD, scale) -> Tensor:
    """diffusers/pipelines/qwenimage/pipeline_qwenimage.py, the lines after its two passes."""
    positive = _stock(transformer, latents_LC, sigma, prompt_TD)
    negative = _stock(transformer, latents_LC, sigma, negative_TD)
    combined = negative + scale * (positive - negative)
    return combined * (
        torch.norm(positive, dim=-1, keepdim=True) / torch.norm(combined, dim=-1, keepdim=True)
    )


@pytest.mark.parametrize("width", [9, 16])
def test_mixed_widths_are_each_sample_alone(adapter, transformer, width):
    latents_BLC, sigma_B, prompts, negatives = _inputs()
    velocity_BLC = adapter.velocity(
        transformer, latents_BLC, sigma_B, _conditioning(prompts, negatives, width), SAMPLING
    )
    for row in range(3):
        expected_LC = _stock(transformer, latents_BLC[row], sigma_B[row], prompts[row])
        assert _error(velocity_BLC[row], expected_LC) <= 1e-6


@pytest.mark.parametrize("scale", [1.5, 4.0])
def test_true_cfg_is_that_of_the_stock_pipeline(adapter, transformer, scale):
    latents_BLC, sigma_B, prompts, negatives = _inputs()
    sampling = replace(SAMPLING, true_cfg_scale=scale)
    velocity_BLC = adapter.velocity(
        transformer, latents_BLC, sigma_B, _conditioning(prompts, negatives), sampling
    )
    for row in range(3):
        expected_LC = _stock_guided(
            transformer, latents_BLC[row], sigma_B[row], prompts[row], negatives[row], scale
        )
        assert _error(velocity_BLC[row], expected_LC) <= scale * 1e-6  # guidance amplifies


def test_both_cfg_passes_carry_gradient(adapter, transformer):
    latents_BLC, sigma_B, prompts, negatives = _inputs()
    conditioning = _conditioning(prompts, negatives)
    for name in ("prompt_embeds", "negative_prompt_embeds"):
        conditioning[name].requires_grad_()
    sampling = replace(SAMPLING, true_cfg_scale=4.0)
    adapter.velocity(
        transformer, latents_BLC, sigma_B, conditioning, sampling
    ).square().sum().backward()
    assert conditioning["prompt_embeds"].grad.abs().sum() > 0
    assert conditioning["negative_prompt_embeds"].grad.abs().sum() > 0


class _Recorder:
    """Stands in for a transformer and keeps what it was called with."""

    dtype = torch.bfloat16

    def __call__(self, **inputs) -> tuple[Tensor]:
        self.inputs = inputs
        return (inputs["hidden_states"],)


def test_padding_that_nobody_uses_is_cut_and_a_full_mask_dropped(adapter):
    latents_BLC, sigma_B, prompts, negatives = _inputs()
    recorder = _Recorder()
    same_length = [prompt[:5] for prompt in prompts]
    velocity_BLC = adapter.velocity(
        recorder, latents_BLC, sigma_B, _conditioning(same_length, negatives, 12), SAMPLING
    )
    assert recorder.inputs["encoder_hidden_states"].shape == (3, 5, DIM)
    assert recorder.inputs["encoder_hidden_states_mask"] is None
    assert (
        recorder.inputs["encoder_hidden_states"].dtype
        == recorder.inputs["hidden_states"].dtype
        == torch.bfloat16
    )
    assert recorder.inputs["timestep"].dtype == velocity_BLC.dtype == torch.float32
    adapter.velocity(
        recorder, latents_BLC, sigma_B, _conditioning(prompts, negatives, 12), SAMPLING
    )
    assert recorder.inputs["encoder_hidden_states_mask"].shape == (3, 9)


def test_guidance_without_negative_prompt_is_refused(adapter):
    latents_BLC, sigma_B, prompts, negatives = _inputs()
    conditioning = _conditioning(prompts, negatives)
    del conditioning["negative_prompt_mask"]
    with pytest.raises(ValueError, match="needs negative_prompt_mask"):
        adapter.velocity(
            _Recorder(), latents_BLC, sigma_B, conditioning, replace(SAMPLING, true_cfg_scale=2.0)
        )


def test_schedule_is_the_checkpoints(adapter, tiny_model, tmp_path):
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(tiny_model / "scheduler")
    config = scheduler.config
    shift = (
        config.base_image_seq_len,
        config.max_image_seq_len,
        config.base_shift,
        config.max_shift,
    )
    scheduler.set_timesteps(
        sigmas=torch.linspace(1, 0.1, 10).tolist(), mu=calculate_shift(12, *shift)
    )
    torch.testing.assert_close(adapter.schedule(SAMPLING), scheduler.sigmas, rtol=1e-6, atol=1e-7)
    shutil.copytree(tiny_model / "transformer", tmp_path / "transformer")
    with pytest.raises(ValueError, match="scheduler_config.json does not exist"):
        QwenImageAdapter(tmp_path).schedule(SAMPLING)


def test_prompts_are_encoded_as_by_the_stock_pipeline(adapter, tiny_model):
    texts = ["a red circle", "a photo of a blue square on a white wall"]
    embeds_BTD, mask_BT = encode_prompts(adapter, texts)
    pipeline = QwenImagePipeline.from_pretrained(tiny_model, vae=None, transformer=None)
    for row, text in enumerate(texts):
        with torch.no_grad():
            expected_BTD, _ = pipeline.encode_prompt(text)
        assert int(mask_BT[row].sum()) == expected_BTD.shape[1]
        torch.testing.assert_close(
            embeds_BTD[row][mask_BT[row]], expected_BTD[0], rtol=1e-5, atol=1e-5
        )
    assert mask_BT.dtype == torch.bool
    assert not mask_BT.all()


def test_one_loaded_text_encoder_serves_many_calls_and_is_freed(adapter):
    before = _text_encoders()
    with adapter.prompt_encoder(dtype=torch.float32, device="cpu") as encode:
        batched = encode(["a red circle", "a photo of a blue square on a white wall"])
        alone_1TD = encode(["a red circle"])["prompt_embeds"]
        (text_encoder,) = [
            each for each in _text_encoders() if all(each is not other for other in before)
        ]
    of_first = batched["prompt_embeds"][0][batched["prompt_mask"][0]]
    torch.testing.assert_close(of_first, alone_1TD[0], rtol=1e-5, atol=1e-5)
    assert {parameter.device.type for parameter in text_encoder.parameters()} == {"meta"}


def _text_encoders():
    # By type(): isinstance() asks a weak reference's proxy, which raises once its object is gone.
    wanted = Qwen2_5_VLForConditionalGeneration
    return [each for each in gc.get_objects() if issubclass(type(each), wanted)]


def test_images_are_encoded_as_by_the_stock_vae_and_pipeline(adapter, tiny_model):
    pixels_BHWC = torch.randint(
        0, 256, (3, 32, 48, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    with adapter.image_encoder(dtype=torch.float32, device="cpu") as encode:
        latents_BLC = encode(pixels_BHWC)
        torch.testing.assert_close(encode(pixels_BHWC[1:2]), latents_BLC[1:2], rtol=0, atol=1e-5)
    assert latents_BLC.shape == (3, *adapter.latents_shape(replace(SAMPLING, height=32, width=48)))

    pipeline = QwenImageImg2ImgPipeline.from_pretrained(
        tiny_model, transformer=None, text_encoder=None, tokenizer=None
    )
    images_BCHW = pipeline.image_processor.preprocess(
        [Image.fromarray(pixels.numpy()) for pixels in pixels_BHWC]
    )
    with torch.no_grad():
        pipeline.vae.encode = partial(_mean_only, pipeline.vae.encode)
        expected_BCTHW = pipeline._encode_vae_image(images_BCHW.unsqueeze(2), generator=None)
    expected_BLC = pipeline._pack_latents(expected_BCTHW, 3, 16, 4, 6)
    torch.testing.assert_close(latents_BLC, expected_BLC, rtol=0, atol=1e-5)
    assert latents_BLC.std() > 0.1


def _mean_only(encode, images):
    """The stock image-to-image pipeline samples the posterior; its mean is what is trained on."""
    posterior = encode(images).latent_dist
    posterior.sample = lambda generator=None: posterior.mean
    return AutoencoderKLOutput(latent_dist=posterior)


def test_shapes_and_flops_at_real_size(adapter):
    assert adapter.latents_shape(SAMPLING) == (12, 64)
    adapter.width, adapter.num_layers = 3072, 60
    sampling = Sampling(height=512, width=512, num_inference_steps=10)
    assert adapter.flops(sampling, 64) == pytest.approx(15.8e12, rel=0.01)
    assert adapter.flops(replace(sampling, true_cfg_scale=4.0), 64) == 2 * adapter.flops(
        sampling, 64
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"height": 520},
            "rollout.height=520 is not a positive multiple of 16.*set rollout.height=512",
        ),
        ({"width": 0}, "rollout.width=0"),
        ({"num_frames": 5}, "rollout.num_frames=5"),
        ({"images": ((64, 64),)}, r"rollout.images=true, but this model \(Qwen-Image\) draws"),
        ({"true_cfg_scale": 0.5}, "rollout.true_cfg_scale=0.5"),
        ({"guidance_scale": 5.0}, "by rollout.true_cfg_scale alone; set rollout.guidance_scale=1"),
    ],
)
def test_impossible_sampling_is_refused(adapter, change, message):
    adapter.validate(SAMPLING)
    with pytest.raises(ValueError, match=message):
        adapter.validate(replace(SAMPLING, **change))


def test_folder_without_transformer_is_refused(tmp_path):
    with pytest.raises(ValueError, match="config.json does not exist"):
        QwenImageAdapter(tmp_path)


def test_an_editing_model_is_refused(tmp_path):
    (tmp_path / "transformer").mkdir()
    sizes = '"in_channels": 4, "num_layers": 1, "num_attention_heads": 1, "attention_head_dim": 1'
    config = tmp_path / "transformer" / "config.json"
    config.write_text(f'{{"zero_cond_t": true, {sizes}}}')
    with pytest.raises(ValueError, match="zero_cond_t=true, an editing model"):
        QwenImageAdapter(tmp_path)
