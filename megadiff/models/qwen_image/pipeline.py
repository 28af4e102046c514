"""Run Qwen-Image inside vllm-omni: its stock pipeline with our schedule, noise and window.

Loaded by the replica under its dotted name. Tested with vllm-omni 0.26 and 0.28.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from vllm_omni.diffusion.models.qwen_image import QwenImagePipeline
from vllm_omni.diffusion.models.qwen_image.rope_utils import txt_seq_lens_from_embeds

from megadiff.models.batch_sampler import BatchSampler, distinct
from megadiff.models.pipeline_base import RolloutPipelineMixin, to_uint8
from megadiff.models.qwen_image.plan import SERVED_NAMES
from megadiff.models.qwen_image.vae import convolve_single_frames_in_2d


class QwenImageRolloutPipeline(RolloutPipelineMixin, QwenImagePipeline):
    supports_step_execution = False
    served_names = SERVED_NAMES

    def __init__(self, *, od_config: Any, prefix: str = "") -> None:
        super().__init__(od_config=od_config, prefix=prefix)
        # vllm-omni leaves these in their files' dtype, which breaks a replica that runs in another.
        # Parameters only: the text encoder's rotary frequencies are float32 buffers and stay so.
        for parameter in (*self.text_encoder.parameters(), *self.vae.parameters()):
            parameter.data = parameter.data.to(od_config.dtype)
        convolve_single_frames_in_2d(self.vae)

    def to_pixels(self, images: Tensor) -> Tensor:
        """Turn [N, 3, H, W] in [-1, 1] into [N, 1, H, W, 3] uint8."""
        return to_uint8(images).permute(0, 2, 3, 1).unsqueeze(1)

    def _decode_latents(
        self, latents: Tensor, height: int, width: int, output_type: str = "pil"
    ) -> Any:
        """Decode as the stock pipeline does, our samples a few rows at a time."""
        # the VAE's activations take hundreds of times the image's memory
        decode = super()._decode_latents
        if self._sampler is None:
            return decode(latents, height, width, output_type)

        num_rows = self.adapter.decoding.num_rows(
            self.device.type, num_frames=1, height=height, width=width
        )
        decoded = [
            decode(rows_BLC, height, width, output_type) for rows_BLC in latents.split(num_rows)
        ]
        images = torch.cat([rows.output for rows in decoded])
        return dataclasses.replace(decoded[0], output=images)

    def _prepare_generation_context(self, **kwargs: Any) -> dict[str, Any]:
        """Return the stock context of the batch's rows; each distinct text is encoded once."""
        sampler = self._sampler
        if sampler is None:
            return super()._prepare_generation_context(**kwargs)

        latents_NLC = sampler.initial_latents()
        sides = {
            side: distinct(texts) for side, texts in self.texts_of_sides(sampler.requests).items()
        }
        kwargs |= {
            "prompt": sides[""][0],
            "negative_prompt": sides["negative_"][0] if "negative_" in sides else None,
            "num_images_per_prompt": 1,
            "latents": latents_NLC,
        }

        context = super()._prepare_generation_context(**kwargs)
        for side, (_, index_P) in sides.items():
            context |= _spread(sampler, context, side, index_P.to(self.device))

        num_rows = latents_NLC.shape[0]
        context["img_shapes"] = context["img_shapes"][:1] * num_rows
        # the stock loop only counts them; predict_noise() gives the transformer its sigma
        timesteps = 1000 * sampler.schedule[:-1]
        return {**context, "latents": latents_NLC, "timesteps": timesteps}


def _spread(
    sampler: BatchSampler, context: dict[str, Any], side: str, index_P: Tensor
) -> dict[str, Any]:
    """Return one side of the context for every row; its rows by group are the conditioning.

    side: "" or "negative_". index_P: a group's text among the distinct ones.
    """
    embeds_PTD = context[f"{side}prompt_embeds"][index_P]
    mask_PT = context[f"{side}prompt_embeds_mask"][index_P].bool()
    sampler.conditioning |= {f"{side}prompt_embeds": embeds_PTD, f"{side}prompt_mask": mask_PT}

    embeds_NTD = sampler.per_row(embeds_PTD)
    return {
        f"{side}prompt_embeds": embeds_NTD,
        # no mask without padding: the stock transformer would find that out in every forward
        f"{side}prompt_embeds_mask": None if bool(mask_PT.all()) else sampler.per_row(mask_PT),
        f"{side}txt_seq_lens": txt_seq_lens_from_embeds(embeds_NTD),
    }
