"""Qwen-Image inside vllm-omni: its stock pipeline, sampling with our schedule, noise and recorded window.

Loaded by the replica under its dotted name. Tested with vllm-omni 0.26 and 0.28.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm_omni.diffusion.models.qwen_image import QwenImagePipeline

from megadiff.diffusion.schedule import qwen_image_sigmas
from megadiff.models.qwen_image.plan import SERVED_NAMES
from megadiff.models.qwen_image.vae import convolve_single_frames_in_2d
from megadiff.models.rollout_base import GroupSampler, RolloutPipelineMixin
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

    def new_sampler(self, request: RolloutRequest) -> GroupSampler:
        sampling = request.sampling
        num_tokens = (sampling.height // PATCH_PIXELS) * (sampling.width // PATCH_PIXELS)
        schedule = qwen_image_sigmas(
            sampling.num_inference_steps, num_tokens=num_tokens, scheduler_config=self.scheduler_config
        )
        token_shape = (num_tokens, self.transformer.in_channels)
        return GroupSampler(request, schedule=schedule, token_shape=token_shape, device=self.device)

    def to_pixels(self, images: Tensor) -> Tensor:
        """[N, 3, H, W] in [-1, 1] → [N, 1, H, W, 3] uint8, rounded as the stock PNGs are."""
        scaled = (images.float() * 0.5 + 0.5).clamp(0, 1) * 255
        return scaled.round().to(torch.uint8).permute(0, 2, 3, 1).unsqueeze(1)

    def _prepare_generation_context(self, **kwargs: Any) -> dict[str, Any]:
        context = super()._prepare_generation_context(**kwargs)
        sampler = self._sampler
        if sampler is None:
            return context
        names = {"prompt_embeds": "prompt_embeds", "prompt_mask": "prompt_embeds_mask"}
        if context["do_true_cfg"]:
            names |= {f"negative_{name}": f"negative_{key}" for name, key in names.items()}
        for name, key in names.items():  # rows of a group are equal: one travels
            tensor = context[key][:1]
            sampler.conditioning[name] = tensor.bool() if name.endswith("mask") else tensor
        return {**context, "latents": sampler.initial_latents(), "timesteps": sampler.timesteps}
