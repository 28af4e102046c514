"""Qwen-Image inside vllm-omni: its stock pipeline, sampling with our schedule, noise and recorded window.

Loaded by the replica under its dotted name. Tested with vllm-omni 0.26 and 0.28.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm_omni.diffusion.models.qwen_image import QwenImagePipeline
from vllm_omni.diffusion.models.qwen_image.rope_utils import txt_seq_lens_from_embeds

from megadiff.diffusion.schedule import qwen_image_sigmas
from megadiff.models.pipeline_base import BatchSampler, RolloutPipelineMixin, distinct
from megadiff.models.qwen_image.plan import SERVED_NAMES
from megadiff.models.qwen_image.vae import DECODING, convolve_single_frames_in_2d
from megadiff.types import RolloutRequest

PATCH_PIXELS = 16  # 8× by the VAE, 2× by packing


class QwenImageRolloutPipeline(RolloutPipelineMixin, QwenImagePipeline):
    supports_step_execution = False
    served_names = SERVED_NAMES

    def __init__(self, *, od_config: Any, prefix: str = "") -> None:
        super().__init__(od_config=od_config, prefix=prefix)
        # vllm-omni leaves these in their files' dtype, which breaks a replica that runs in another. Parameters only:
        # the text encoder's rotary frequencies are float32 buffers and stay so
        for parameter in (*self.text_encoder.parameters(), *self.vae.parameters()):
            parameter.data = parameter.data.to(od_config.dtype)
        convolve_single_frames_in_2d(self.vae)
        self.set_progress_bar_config(disable=True)
        # the file itself: the scheduler object fills missing keys with code defaults, which give another schedule
        path = Path(od_config.model) / "scheduler" / "scheduler_config.json"
        self.scheduler_config = json.loads(path.read_text(encoding="utf-8"))

    def new_sampler(self, requests: Sequence[RolloutRequest]) -> BatchSampler:
        self._check_lengths(requests)
        sampling = requests[0].sampling
        num_tokens = (sampling.height // PATCH_PIXELS) * (sampling.width // PATCH_PIXELS)
        schedule = qwen_image_sigmas(
            sampling.num_inference_steps,
            num_tokens=num_tokens,
            scheduler_config=self.scheduler_config,
        )
        token_shape = (num_tokens, self.transformer.in_channels)
        return BatchSampler(
            requests, schedule=schedule, token_shape=token_shape, device=self.device
        )

    def to_pixels(self, images: Tensor) -> Tensor:
        """[N, 3, H, W] in [-1, 1] → [N, 1, H, W, 3] uint8, rounded as the stock PNGs are."""
        scaled = (images.float() * 0.5 + 0.5).clamp(0, 1) * 255
        return scaled.round().to(torch.uint8).permute(0, 2, 3, 1).unsqueeze(1)

    def _decode_latents(
        self, latents: Tensor, height: int, width: int, output_type: str = "pil"
    ) -> Any:
        """The stock decoding, a few rows at a time: the VAE's activations take hundreds of times the image's memory."""
        decode = super()._decode_latents
        if self._sampler is None:
            return decode(latents, height, width, output_type)
        num_rows = DECODING.num_rows(self.device.type, num_frames=1, height=height, width=width)
        parts = [
            decode(rows_BLC, height, width, output_type) for rows_BLC in latents.split(num_rows)
        ]
        return dataclasses.replace(parts[0], output=torch.cat([part.output for part in parts]))

    def _prepare_generation_context(self, **kwargs: Any) -> dict[str, Any]:
        """The stock context of each *distinct* text, in one pass of the text encoder, spread over the rows of the batch."""
        sampler = self._sampler
        if sampler is None:
            return super()._prepare_generation_context(**kwargs)
        latents_NLC = sampler.initial_latents()
        texts, place_P = distinct([request.prompt.text for request in sampler.requests])
        sides = {"": place_P}
        kwargs |= {
            "prompt": texts,
            "negative_prompt": None,
            "num_images_per_prompt": 1,
            "latents": latents_NLC,
        }
        if sampler.sampling.true_cfg_scale > 1:
            kwargs["negative_prompt"], sides["negative_"] = distinct(
                [request.prompt.negative_text for request in sampler.requests]
            )
        context = super()._prepare_generation_context(**kwargs)
        for side, place_P in sides.items():
            context |= self._spread(context, side, place_P.to(self.device))
        num_rows = latents_NLC.shape[0]
        context["img_shapes"] = context["img_shapes"][:1] * num_rows
        return {**context, "latents": latents_NLC, "timesteps": sampler.timesteps}

    def _spread(self, context: dict[str, Any], side: str, place_P: Tensor) -> dict[str, Any]:
        """The side's ("" or "negative_") part of the context for every row; keeps the group's rows as its conditioning."""
        embeds_PTD = context[f"{side}prompt_embeds"][place_P]
        mask_PT = context[f"{side}prompt_embeds_mask"][place_P].bool()
        sampler = self._sampler
        sampler.conditioning |= {f"{side}prompt_embeds": embeds_PTD, f"{side}prompt_mask": mask_PT}
        embeds_NTD = sampler.per_row(embeds_PTD)
        return {
            f"{side}prompt_embeds": embeds_NTD,
            # no mask without padding: the stock transformer would find that out anew in every forward
            f"{side}prompt_embeds_mask": None if bool(mask_PT.all()) else sampler.per_row(mask_PT),
            f"{side}txt_seq_lens": txt_seq_lens_from_embeds(embeds_NTD),
        }

    def _check_lengths(self, requests: Sequence[RolloutRequest]) -> None:
        """Raises ValueError that names the request whose text is too long. A token is at least one byte, so that only
        texts of more bytes than that are tokenised here."""
        limit = self.tokenizer_max_length
        for place, request in enumerate(requests):
            texts = {"prompt": request.prompt.text}
            if request.sampling.true_cfg_scale > 1:
                texts["negative prompt"] = request.prompt.negative_text
            for name, text in texts.items():
                count = len(self.tokenizer(text).input_ids) if len(text.encode()) > limit else 0
                if count > limit:
                    raise ValueError(
                        f"requests[{place}] (prompt {request.prompt.id}): the {name} is too long, {count} tokens, the "
                        f"model takes {limit}; shorten {text[:60]!r}…"
                    )
