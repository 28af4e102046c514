"""Adapt Z-Image to the trainer: latents, conditioning, timestep unit, sign and lists of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megadiff.models.adapter import Images
from megadiff.models.decoding import TokenCount
from megadiff.models.image_family import ImageFamily
from megadiff.models.packing import pad_rows
from megadiff.models.z_image.attention import ZImageAttention
from megadiff.models.z_image.plan import PLAN
from megadiff.types import Sampling, Tensors

FILL = 32  # image and text are each filled up to a multiple, with learned tokens that count
TEMPLATE_TOKENS = 8  # that the chat template puts around a prompt
TURBO_SHIFT = 3.0  # of the scheduler of Z-Image-Turbo; Base has 6


class ZImageAdapter(ImageFamily):
    """Work with diffusers' own transformer and every engine's.

    Guidance is plain: negative + scale·(positive − negative), off at 1. The stock pipelines count
    from 0: their guidance_scale is one less than rollout.guidance_scale for the same image.
    """

    title = "Z-Image"
    published = {"Base, 6.2 B": ""}
    pipeline_class = "ZImagePipeline"
    transformer_class = "ZImageTransformer2DModel"
    rollout_pipeline = "megadiff.models.z_image.pipeline:ZImageRolloutPipeline"
    tokenizer_class = "Qwen2Tokenizer"
    plan = PLAN
    attention = staticmethod(ZImageAttention)
    size_keys = ("n_layers", "n_heads", "dim")
    text_width_key = "cap_feat_dim"
    max_prompt_tokens = 512 - TEMPLATE_TOKENS  # as in the pipeline of diffusers

    def check_trained(self) -> None:
        if self.static_shift() == TURBO_SHIFT:
            raise ValueError(
                f"{self.model_folder}/scheduler has shift={TURBO_SHIFT}, so this is Z-Image-Turbo "
                "(Base has 6.0): distilled to 8 steps without guidance, and blurred by RL as "
                "others report; set model.path to Z-Image Base, or ask for Turbo by "
                f"model.family={__name__}:{ZImageTurboAdapter.__name__}"
            )

    def one_pass(
        self,
        transformer: Any,
        latents_BCHW: Tensor,
        sigma_B: Tensor,
        text: Mapping[str, Tensor],
    ) -> Tensor:
        lengths = text["prompt_mask"].sum(dim=1).tolist()
        embeds = text["prompt_embeds"].to(latents_BCHW.dtype)
        (images,) = transformer(
            x=list(latents_BCHW.unsqueeze(2)),
            # time runs from noise to image; rounded as the stock pipelines round it
            t=(1000 - 1000 * sigma_B) / 1000,
            cap_feats=[row_TD[:length] for row_TD, length in zip(embeds, lengths, strict=True)],
            return_dict=False,
        )
        # It says where the image is, a velocity where the noise is. Guidance is in float32, as in
        # the stock pipelines.
        return -torch.stack(images).squeeze(2).float()

    def encode(self, pipeline: Any, texts: Sequence[str], images: Sequence[Images]) -> Tensors:
        # a copy: the pipeline puts the filled-in template in its place
        embeds, _ = pipeline.encode_prompt(list(texts), do_classifier_free_guidance=False)
        embeds_BTD, mask_BT = pad_rows(embeds)
        return {"prompt_embeds": embeds_BTD, "prompt_mask": mask_BT}

    def token_count(self, sampling: Sampling, num_text_tokens: int) -> TokenCount:
        image, _ = self.latents_shape(sampling)
        return TokenCount(image=filled(image), text=filled(num_text_tokens))

    def flops(self, sampling: Sampling, num_text_tokens: int) -> float:
        """Count the refiners: one for the image and one for the text are as much as a block."""
        of_blocks = super().flops(sampling, num_text_tokens)
        return of_blocks * (1 + self.config["n_refiner_layers"] / self.num_layers)


class ZImageTurboAdapter(ZImageAdapter):
    """Train Z-Image-Turbo for a config that asks for it."""

    title = "Z-Image-Turbo"

    def check_trained(self) -> None:
        pass


def filled(num_tokens: int) -> int:
    """Return the tokens of an image or a text after learned ones have filled it up."""
    return -(-num_tokens // FILL) * FILL
