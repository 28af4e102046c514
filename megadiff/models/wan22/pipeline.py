"""Wan2.2 inside vllm-omni: its stock pipeline, sampling with our schedule, noise and recorded window.

Loaded by the replica under its dotted name. Tested with vllm-omni 0.26 and 0.28. The stock `forward` makes its scheduler
anew for each request, and knows one boundary for all models, so our requests do not take it: they are drawn here, by
vllm-omni's transformers and the trainer's own velocity function.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm_omni.diffusion.data import DiffusionOutput
from vllm_omni.diffusion.models.wan2_2 import Wan22Pipeline

from megadiff.models.adapter import FIRST_FRAME
from megadiff.models.pipeline_base import BatchSampler, RolloutPipelineMixin, distinct
from megadiff.models.wan22 import text as wan_text
from megadiff.models.wan22 import vae as wan_vae
from megadiff.models.wan22.checkpoint import WanCheckpoint
from megadiff.models.wan22.packing import unpack
from megadiff.models.wan22.plan import SERVED_NAMES
from megadiff.models.wan22.velocity import TEXT_TOKENS, wan_velocity
from megadiff.types import RolloutRequest


class WanRolloutPipeline(RolloutPipelineMixin, Wan22Pipeline):
    served_names = SERVED_NAMES

    def __init__(self, *, od_config: Any, prefix: str = "") -> None:
        super().__init__(od_config=od_config, prefix=prefix)
        self.checkpoint = WanCheckpoint.read(Path(od_config.model))
        self.boundary_ratio = (
            self.checkpoint.boundary_ratio
        )  # vllm-omni takes 0.875 for every model
        self.policy_components = self.checkpoint.components
        self.set_progress_bar_config(disable=True)

    def new_sampler(self, requests: Sequence[RolloutRequest]) -> BatchSampler:
        sampling = requests[0].sampling
        self.checkpoint.validate(sampling)
        self._check_lengths(requests)
        token_shape = self.checkpoint.latents_shape(sampling)
        schedule = self.checkpoint.schedule(sampling.num_inference_steps)
        return BatchSampler(
            requests, schedule=schedule, token_shape=token_shape, device=self.device
        )

    def draw(self, req: Any) -> DiffusionOutput:
        """The groups' videos, as _decoded has them."""
        sampler = self._sampler
        self._encode_texts(sampler)
        if sampler.sampling.first_frame:
            self._encode_first_frames(sampler)
        return DiffusionOutput(output=self._decoded(self._denoised(sampler)))

    def to_pixels(self, images: Tensor) -> Tensor:
        return images

    def _encode_texts(self, sampler: BatchSampler) -> None:
        """Each distinct text once, as the groups' conditioning."""
        sides = {"": [request.prompt.text for request in sampler.requests]}
        if self.checkpoint.is_guided(sampler.sampling):
            sides["negative_"] = [request.prompt.negative_text for request in sampler.requests]
        for side, side_texts in sides.items():
            texts, place_P = distinct(side_texts)
            embeds_BTD, mask_BT = wan_text.encode(texts, self.tokenizer, self.text_encoder)
            place_P = place_P.to(embeds_BTD.device)
            sampler.conditioning |= {
                f"{side}prompt_embeds": embeds_BTD[place_P].to(self.od_config.dtype),
                f"{side}prompt_mask": mask_BT[place_P],
            }

    def _encode_first_frames(self, sampler: BatchSampler) -> None:
        """Each distinct image once, one at a time, as the groups' conditioning."""
        sampling = sampler.sampling
        images, place_P = distinct([request.first_frame for request in sampler.requests])
        shape = (1, 1, sampling.height, sampling.width, 3)
        latents = [
            wan_vae.encode(
                self.vae, torch.frombuffer(bytearray(image), dtype=torch.uint8).view(shape)
            )
            for image in images
        ]
        sampler.conditioning[FIRST_FRAME] = torch.cat(latents)[place_P.to(self.device)]

    def _denoised(self, sampler: BatchSampler) -> Tensor:
        """Latents [N, C, F, H, W] at sigma 0. A step's velocity is the trainer's: the same function, expert and scale."""
        grid = self.checkpoint.grid(sampler.sampling)
        conditioning = {
            name: sampler.per_row(value_P) for name, value_P in sampler.conditioning.items()
        }
        latents_NLC = sampler.initial_latents()
        for sigma in sampler.schedule[:-1].tolist():
            component = self.checkpoint.component_of(sigma)
            velocity_NLC = wan_velocity(
                getattr(self, component),
                latents_NLC,
                self.checkpoint.timestep(
                    torch.full(latents_NLC.shape[:1], sigma, device=self.device)
                ),
                conditioning,
                grid=grid,
                guidance_scale=self.checkpoint.guidance_scale(component, sampler.sampling),
            )
            latents_NLC = sampler.step(velocity_NLC, latents_NLC)
        given = [conditioning[FIRST_FRAME].to(latents_NLC)] if sampler.sampling.first_frame else []
        return unpack(torch.cat([*given, latents_NLC], dim=1), grid)

    def _decoded(self, latents_NCFHW: Tensor) -> Tensor:
        """[N, F, H, W, 3] uint8 on the CPU, rounded as the stock frames are. A few rows at a time: the VAE's activations take
        hundreds of times a video's memory, and all videos in the decoder's dtype would take more than the latents."""
        vae = self.vae
        mean, std = wan_vae.latent_statistics(vae, self.device)
        frames, height, width = latents_NCFHW.shape[2:]
        num_frames, side = frames * self.checkpoint.temporal, self.checkpoint.spatial
        num_rows = wan_vae.DECODING.num_rows(
            self.device.type, num_frames=num_frames, height=height * side, width=width * side
        )
        rows = (latents_NCFHW.float() * std + mean).to(vae.dtype).split(num_rows)
        return torch.cat([_to_uint8(vae.decode(each, return_dict=False)[0]).cpu() for each in rows])

    def _check_lengths(self, requests: Sequence[RolloutRequest]) -> None:
        """Raises ValueError that names the request whose text is too long: the stock pipeline would cut it off."""
        for place, request in enumerate(requests):
            texts = {"prompt": request.prompt.text}
            if self.checkpoint.is_guided(request.sampling):
                texts["negative prompt"] = request.prompt.negative_text
            for name, text in texts.items():
                count = wan_text.num_tokens(text, self.tokenizer)
                if count > TEXT_TOKENS:
                    raise ValueError(
                        f"requests[{place}] (prompt {request.prompt.id}): the {name} is too long, {count} tokens, the "
                        f"model takes {TEXT_TOKENS}; shorten {text[:60]!r}…"
                    )


def _to_uint8(videos_N3FHW: Tensor) -> Tensor:
    """[N, 3, F, H, W] in [-1, 1] → [N, F, H, W, 3]."""
    scaled = (videos_N3FHW.float() * 0.5 + 0.5).clamp(0, 1) * 255
    return scaled.round().to(torch.uint8).permute(0, 2, 3, 4, 1).contiguous()
