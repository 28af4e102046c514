"""Run Wan2.2 inside vllm-omni with our schedule, noise and recorded window.

Loaded by the replica under its dotted name. Tested with vllm-omni 0.26 and 0.28. The stock
`forward` makes its scheduler anew for each request, and knows one boundary for all models. So our
requests are drawn here, by vllm-omni's transformers and the trainer's own velocity function.
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
from megadiff.models.pipeline_base import BatchSampler, RolloutPipelineMixin, distinct, to_uint8
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
        # vllm-omni takes 0.875 for every model
        self.boundary_ratio = self.checkpoint.boundary_ratio
        self.policy_components = self.checkpoint.components
        self.set_progress_bar_config(disable=True)

    def new_sampler(self, requests: Sequence[RolloutRequest]) -> BatchSampler:
        sampling = requests[0].sampling
        self.checkpoint.validate(sampling)
        is_guided = self.checkpoint.is_guided(sampling)
        self.check_lengths(requests, limit=TEXT_TOKENS, is_guided=is_guided)
        token_shape = self.checkpoint.latents_shape(sampling)
        schedule = self.checkpoint.schedule(sampling.num_inference_steps)
        return BatchSampler(
            requests, schedule=schedule, token_shape=token_shape, device=self.device
        )

    def draw(self, req: Any) -> DiffusionOutput:
        """Return the groups' videos, as _decoded has them."""
        sampler = self._sampler
        assert sampler is not None  # forward() has made it
        self._encode_texts(sampler)
        if sampler.sampling.first_frame:
            self._encode_first_frames(sampler)
        return DiffusionOutput(output=self._decoded(self._denoised(sampler)))

    def to_pixels(self, images: Tensor) -> Tensor:
        return images

    def num_prompt_tokens(self, text: str, limit: int) -> int:
        return wan_text.num_tokens(text, self.tokenizer)

    def _encode_texts(self, sampler: BatchSampler) -> None:
        """Encode each distinct text once, as the groups' conditioning."""
        sides = {"": [request.prompt.text for request in sampler.requests]}
        if self.checkpoint.is_guided(sampler.sampling):
            sides["negative_"] = [request.prompt.negative_text for request in sampler.requests]
        for side, side_texts in sides.items():
            texts, index_P = distinct(side_texts)
            embeds_BTD, mask_BT = wan_text.encode(texts, self.tokenizer, self.text_encoder)
            index_P = index_P.to(embeds_BTD.device)
            sampler.conditioning |= {
                f"{side}prompt_embeds": embeds_BTD[index_P].to(self.od_config.dtype),
                f"{side}prompt_mask": mask_BT[index_P],
            }

    def _encode_first_frames(self, sampler: BatchSampler) -> None:
        """Encode each distinct image once, as the groups' conditioning."""
        sampling = sampler.sampling
        images, index_P = distinct([request.first_frame for request in sampler.requests])
        shape = (1, 1, sampling.height, sampling.width, 3)
        latents = []
        for image in images:  # one at a time: the VAE's activations are large
            pixels = torch.frombuffer(bytearray(image), dtype=torch.uint8).view(shape)
            latents.append(wan_vae.encode(self.vae, pixels))
        sampler.conditioning[FIRST_FRAME] = torch.cat(latents)[index_P.to(self.device)]

    def _denoised(self, sampler: BatchSampler) -> Tensor:
        """Return latents [N, C, F, H, W] at sigma 0.

        A step's velocity is the trainer's: the same function, expert and scale.
        """
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
        """Decode to [N, F, H, W, 3] uint8 on the CPU, rounded as the stock frames are."""
        vae = self.vae
        mean, std = wan_vae.latent_statistics(vae, self.device)
        frames, height, width = latents_NCFHW.shape[2:]
        num_rows = wan_vae.DECODING.num_rows(
            self.device.type,
            num_frames=frames * self.checkpoint.temporal,
            height=height * self.checkpoint.spatial,
            width=width * self.checkpoint.spatial,
        )
        batches = (latents_NCFHW.float() * std + mean).to(vae.dtype).split(num_rows)
        # A few rows at a time: the VAE's activations take hundreds of times a video's memory. Each
        # goes to the CPU at once: all in the decoder's dtype would take more than the latents.
        videos = []
        for rows_BCFHW in batches:
            (decoded_B3FHW,) = vae.decode(rows_BCFHW, return_dict=False)[:1]
            videos.append(to_uint8(decoded_B3FHW).permute(0, 2, 3, 4, 1).contiguous().cpu())
        return torch.cat(videos)
