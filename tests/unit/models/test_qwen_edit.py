"""The Qwen-Image-Edit adapter against stock diffusers: same text, velocity and trajectory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
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

from examples.tiny_models.qwen_image_edit import KINDS, write_tiny_pipeline
from megadiff.models.qwen_image_edit.text import PictureProcessor, encode, sides_of_area

TEXTS = ["make the circle red", "turn it into a blue square, with {braces} left"]


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / request.param
    write_tiny_pipeline(folder, kind=request.param)
    return folder


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
