"""The Qwen-Image-Edit adapter against stock diffusers: same text, velocity and trajectory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImageEditPlusPipeline,
    QwenImageTransformer2DModel,
)
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as stock
from PIL import Image
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration

from megadiff.diffusion.sde import ode_step
from megadiff.models.conditioning import IMAGE_LATENTS
from megadiff.models.packing import TokenGrid
from megadiff.models.qwen_image_edit.adapter import QwenImageEditAdapter
from megadiff.models.qwen_image_edit.sides import sides_of_area
from megadiff.models.qwen_image_edit.text import PictureProcessor, encode
from megadiff.types import Prompt, Sampling

AREA = 64 * 64
SAMPLING = Sampling(
    height=64, width=64, images=((64, 64),), num_inference_steps=4, true_cfg_scale=3.0
)
IMAGES = {"one": [(64, 64)], "two": [(64, 64), (32, 128)]}
TEXTS = ["make the circle red", "turn it into a blue square, with {braces} left"]


@pytest.fixture(scope="module", params=["2509", "2511"])
def folder(request: pytest.FixtureRequest, tiny_folder: Callable[[str], Path]) -> Path:
    return tiny_folder(f"qwen_image_edit_{request.param}")


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> Iterator[QwenImageEditPlusPipeline]:
    """diffusers' own, whose text encoder is told which tokens are a picture's.

    diffusers 0.40 does not with transformers 5 (its issue 14194): positions are then those of text.
    """
    text_encoder = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder / "text_encoder")
    processor = PictureProcessor.from_pretrained(folder)
    pipeline = QwenImageEditPlusPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler"),
        vae=AutoencoderKLQwenImage.from_pretrained(folder / "vae"),
        text_encoder=text_encoder,
        tokenizer=processor.tokenizer,
        processor=processor,
        transformer=QwenImageTransformer2DModel.from_pretrained(folder / "transformer"),
    )
    pipeline.set_progress_bar_config(disable=True)
    forward = text_encoder.forward

    def told(*, input_ids: Tensor, **kwargs: Any) -> Any:
        types = (input_ids == processor.image_token_id).int()
        return forward(input_ids=input_ids, **{"mm_token_type_ids": types, **kwargs})

    with patch.object(text_encoder, "forward", told):
        yield pipeline


def _pictures(*sizes: tuple[int, int]) -> tuple[Tensor, ...]:
    rng = np.random.default_rng(0)
    # smooth: resampling noise would leave grey
    small = [rng.integers(0, 256, (4, 4, 3), np.uint8) for _ in sizes]
    return tuple(
        torch.tensor(np.asarray(Image.fromarray(pixels).resize((width, height))))
        for pixels, (height, width) in zip(small, sizes, strict=True)
    )


@pytest.mark.parametrize("sizes", [[(64, 64)], [(64, 96), (128, 32)]])
def test_text_and_pictures_are_encoded_as_by_the_stock_pipeline(pipeline, sizes):
    pictures = _pictures(*sizes)
    found_BTD, mask_BT = encode(
        TEXTS, [pictures, pictures[:1]], pipeline.processor, pipeline.text_encoder
    )
    for row, of_row in enumerate([pictures, pictures[:1]]):
        scaled = []
        for picture in of_row:
            height, width = picture.shape[:2]
            stock_width, stock_height = stock.calculate_dimensions(384 * 384, width / height)
            assert sides_of_area(height, width, 384 * 384) == (stock_height, stock_width)
            image = Image.fromarray(picture.numpy())
            scaled.append(pipeline.image_processor.resize(image, stock_height, stock_width))
        expected_BTD, _ = pipeline.encode_prompt([TEXTS[row]], image=scaled)
        length = int(mask_BT[row].sum())
        assert mask_BT[row, :length].all() and length == expected_BTD.shape[1]
        torch.testing.assert_close(found_BTD[row, :length], expected_BTD[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mark", ["<|image_pad|>", "<|video_pad|>"])
def test_a_pictures_place_in_a_text_is_refused(folder, pipeline, mark):
    """The processor would look for a picture more, and end in a StopIteration or TypeError."""
    adapter = QwenImageEditAdapter(folder)
    text = f"paint {mark} red"
    for prompt in (
        Prompt(text=text, id="0" * 16),
        Prompt(text="a", negative_text=text, id="0" * 16),
    ):
        with pytest.raises(ValueError, match=rf"holds {re.escape(mark)}, which .*remove it"):
            adapter.check_prompts([prompt])
    with pytest.raises(ValueError, match=rf"holds {re.escape(mark)}, which"):
        pipeline.processor.inputs(text, _pictures((64, 64)))
    # the other marks are tokens like others
    adapter.check_prompts([Prompt(text="<|vision_start|><|im_end|>", id="0" * 16)])


@pytest.fixture(scope="module", params=IMAGES)
def drawn(
    request: pytest.FixtureRequest, folder: Path, pipeline: QwenImageEditPlusPipeline
) -> SimpleNamespace:
    """The stock pipeline's latents after all steps, from the noise and conditioning kept here."""
    adapter = QwenImageEditAdapter(folder)
    sizes = tuple(IMAGES[request.param])
    sampling = replace(SAMPLING, images=sizes)
    adapter.validate(sampling)
    # the sizes are those that both sides make of them, so neither resamples
    assert [adapter.image_size(*size, sampling) for size in sizes] == list(sizes)
    pictures = _pictures(*sizes)
    texts = {"": TEXTS[0], "negative_": TEXTS[1]}

    cpu = {"dtype": torch.float32, "device": torch.device("cpu")}
    conditioning = {}
    with adapter.prompt_encoder(**cpu) as encode_texts:
        for side, text in texts.items():
            for name, value in encode_texts([text], [pictures]).items():
                conditioning[side + name] = value
    with adapter.image_encoder(**cpu) as encode_images:
        latents_1LC = adapter.image_latents(encode_images, pictures, sampling)
    assert latents_1LC.shape[1:] == adapter.image_latents_shape(sampling)

    noise_1LC = torch.randn(1, *adapter.latents_shape(sampling), generator=torch.manual_seed(0))
    with patch.object(stock, "VAE_IMAGE_SIZE", AREA):
        stock_1LC = pipeline(
            image=[Image.fromarray(picture.numpy()) for picture in pictures],
            prompt=texts[""],
            negative_prompt=texts["negative_"],
            true_cfg_scale=sampling.true_cfg_scale,
            height=sampling.height,
            width=sampling.width,
            num_inference_steps=sampling.num_inference_steps,
            latents=noise_1LC,
            output_type="latent",
        ).images
    return SimpleNamespace(
        adapter=adapter,
        transformer=pipeline.transformer,
        sampling=sampling,
        conditioning=conditioning | {IMAGE_LATENTS: latents_1LC},
        noise_1LC=noise_1LC,
        stock_1LC=stock_1LC,
    )


def _gap(drawn: SimpleNamespace, **changes: Any) -> float:
    """The largest difference to the stock pipeline's latents after all steps."""
    case = SimpleNamespace(**{**vars(drawn), **changes})
    latents_1LC = case.noise_1LC
    schedule = case.adapter.schedule(case.sampling)
    with torch.no_grad():
        for sigma, sigma_next in zip(schedule, schedule[1:]):
            velocity_1LC = case.adapter.velocity(
                case.transformer, latents_1LC, sigma[None], case.conditioning, case.sampling
            )
            latents_1LC = ode_step(latents_1LC, velocity_1LC, sigma, sigma_next)
    return float((latents_1LC - case.stock_1LC).abs().max())


def test_the_trajectory_is_that_of_the_stock_pipeline(drawn):
    assert _gap(drawn) <= 2e-5


def test_every_fault_of_the_forward_shows(drawn):
    """Each would be found by the gate: it moves latents by far more than rounding."""
    given_1LC = drawn.conditioning[IMAGE_LATENTS]
    faults = {"dropped": {"conditioning": drawn.conditioning | {IMAGE_LATENTS: 0 * given_1LC}}}
    if len(drawn.sampling.images) == 1:
        # as many tokens in another shape
        sampling = replace(drawn.sampling, images=((32, 128),))
        faults["shape"] = {"sampling": sampling}
    else:
        first, second = given_1LC.split([16, 16], dim=1)
        swapped_1LC = torch.cat([second, first], dim=1)
        faults["order"] = {"conditioning": drawn.conditioning | {IMAGE_LATENTS: swapped_1LC}}
    if drawn.transformer.zero_cond_t:
        faults["zero_cond_t"] = {"transformer": _without_zero_time(drawn.transformer)}
    for name, fault in faults.items():
        assert _gap(drawn, **fault) > 1e-3, name

    by_all_tokens = drawn.adapter.token_count(drawn.sampling, 0).image
    with patch.object(TokenGrid, "num_tokens", by_all_tokens):
        schedule = drawn.adapter.schedule(drawn.sampling)
    with patch.object(drawn.adapter, "schedule", lambda sampling: schedule):
        assert _gap(drawn) > 1e-3


def _without_zero_time(transformer: Any) -> Any:
    """The same weights, as if given images were as noisy as what is drawn."""
    config = {**transformer.config, "zero_cond_t": False}
    other = QwenImageTransformer2DModel.from_config(config)
    other.load_state_dict(transformer.state_dict())
    return other


def test_what_cannot_be_given_is_refused(folder):
    adapter = QwenImageEditAdapter(folder)
    with pytest.raises(ValueError, match="rollout.images=false, but Qwen-Image-Edit starts"):
        adapter.validate(replace(SAMPLING, images=()))
    with pytest.raises(ValueError, match="5 images are given, Qwen-Image-Edit takes 4"):
        adapter.validate(replace(SAMPLING, images=((64, 64),) * 5))
    # at 1024² these are the stock pipelines' sizes
    for height, width in ((3000, 2000), (64, 64), (480, 853)):
        square = replace(SAMPLING, height=1024, width=1024)
        expected = stock.calculate_dimensions(1024 * 1024, width / height)
        assert adapter.image_size(height, width, square) == expected[::-1]
    # the stock ones would scale it to nothing
    with pytest.raises(ValueError, match="has 4000x40 pixels; scaled to an area of 4096 pixels"):
        adapter.image_size(40, 4000, SAMPLING)
    # what the transformer takes, and the text encoder's processor does not
    with pytest.raises(ValueError, match="has 3000x10 pixels; for the text encoder one side may"):
        adapter.image_size(10, 3000, square)
    assert adapter.image_size(10, 1900, square) == (64, 14112)
