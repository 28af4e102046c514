"""Adapt Qwen-Image-Edit (2509, 2511) to the trainer: what Qwen-Image is, with given images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megadiff.models.adapter import Images
from megadiff.models.conditioning import IMAGE_LATENTS
from megadiff.models.decoding import TokenCount
from megadiff.models.qwen_image.adapter import QwenImageAdapter
from megadiff.models.qwen_image_edit.marks import check_text
from megadiff.models.qwen_image_edit.sides import picture_sides, sides_of_area
from megadiff.types import Prompt, Sampling, Tensors


class QwenImageEditAdapter(QwenImageAdapter):
    """Work with diffusers' own transformer, every engine's and vllm-omni's.

    The transformer sees the drawn image's tokens and then those of the given ones, clean. Its
    output is cut to the former, by whose number alone the schedule is shifted.
    """

    title = "Qwen-Image-Edit"
    published = {"2509, 20.4 B": "", "2511, 20.4 B": ""}
    pipeline_class = "QwenImageEditPlusPipeline"
    served_names = None  # its replica was never seen to map a base
    rollout_pipeline = "megadiff.models.qwen_image_edit.pipeline:QwenImageEditRolloutPipeline"
    supervised_obstacle = "an edit begins with given images, which captioned ones lack"
    needs_images = True
    most_images = 4  # as in vllm-omni's pipeline; more do not fit into the prompt

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        for prompt in prompts:
            check_text(prompt.text)
            check_text(prompt.negative_text)
        super().check_prompts(prompts)

    def image_size(self, height: int, width: int, sampling: Sampling) -> tuple[int, int]:
        """Return the size with the drawn image's area in the given image's own shape.

        The stock pipelines give all images an area of 1024², which is the same where that is drawn.
        """
        picture_sides(height, width)  # what its text encoder refuses, too
        return sides_of_area(height, width, sampling.height * sampling.width)

    def image_shapes(self, sampling: Sampling) -> list[tuple[int, int, int]]:
        pixels = self.pixels_per_token
        given = [(1, height // pixels, width // pixels) for height, width in sampling.images]
        return [*super().image_shapes(sampling), *given]

    def packed_pass(
        self,
        transformer: Any,
        latents_BLC: Tensor,
        sigma_B: Tensor,
        text: Mapping[str, Tensor],
        sampling: Sampling,
    ) -> Tensor:
        given_BLC = text[IMAGE_LATENTS].to(latents_BLC.dtype)
        all_BLC = torch.cat([latents_BLC, given_BLC], dim=1)
        velocity_BLC = super().packed_pass(transformer, all_BLC, sigma_B, text, sampling)
        return velocity_BLC[:, : latents_BLC.shape[1]]

    def text_pipeline(self, dtype: torch.dtype) -> Any:
        """Load what encodes instructions: the stock pipeline's processor needs torchvision."""
        from transformers import Qwen2_5_VLForConditionalGeneration

        from megadiff.models.qwen_image_edit.text import PictureProcessor

        text_encoder = Qwen2_5_VLForConditionalGeneration.from_pretrained(
            self.model_folder / "text_encoder", dtype=dtype
        )
        processor = PictureProcessor.from_pretrained(self.model_folder)
        return SimpleNamespace(processor=processor, text_encoder=text_encoder)

    def encode(self, pipeline: Any, texts: Sequence[str], images: Sequence[Images]) -> Tensors:
        # It imports transformers: seconds that a command like `megadiff plan` can do without.
        from megadiff.models.qwen_image_edit.text import encode

        embeds_BTD, mask_BT = encode(texts, images, pipeline.processor, pipeline.text_encoder)
        return {"prompt_embeds": embeds_BTD, "prompt_mask": mask_BT}

    def token_count(self, sampling: Sampling, num_text_tokens: int) -> TokenCount:
        """Count the tokens of all images: all pass through all blocks."""
        num_tokens = sum(rows * columns for _, rows, columns in self.image_shapes(sampling))
        return TokenCount(image=num_tokens, text=num_text_tokens)
