"""Run Wan2.2 inside vllm-omni with our schedule, noise and recorded window.

Loaded by the replica under its dotted name. Tested with vllm-omni 0.26 and 0.28. The stock
`forward` makes its scheduler anew for each request, and knows one boundary for all models. So our
requests are drawn here, by vllm-omni's transformers and the trainer's own velocity function.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm_omni.diffusion.data import DiffusionOutput
from vllm_omni.diffusion.models.wan2_2 import Wan22Pipeline

from megadiff.models.adapter import IMAGE_LATENTS
from megadiff.models.batch_sampler import BatchSampler, distinct
from megadiff.models.packing import unpack
from megadiff.models.pipeline_base import RolloutPipelineMixin, to_uint8
from megadiff.models.vae import encode_images, latent_statistics, pixels_of
from megadiff.models.wan22 import text as wan_text
from megadiff.models.wan22.adapter import WanAdapter
from megadiff.models.wan22.plan import SERVED_NAMES


class WanRolloutPipeline(RolloutPipelineMixin, Wan22Pipeline):
    adapter: WanAdapter
    served_names = SERVED_NAMES

    def __init__(self, *, od_config: Any, prefix: str = "") -> None:
        super().__init__(od_config=od_config, prefix=prefix)
        # vllm-omni takes 0.875 for every model
        self.boundary_ratio = self.adapter.boundary_ratio

    def draw(self, req: Any) -> DiffusionOutput:
        """Return the groups' videos, as _decoded has them."""
        sampler = self._sampler
        assert sampler is not None  # forward() has made it
        self._encode_texts(sampler)
        if sampler.sampling.images:
            self._encode_images(sampler)
        return DiffusionOutput(output=self._decoded(self._denoised(sampler)))

    def to_pixels(self, images: Tensor) -> Tensor:
        return images

    def _encode_texts(self, sampler: BatchSampler) -> None:
        """Encode each distinct text once, as the groups' conditioning."""
        for side, side_texts in self.texts_of_sides(sampler.requests).items():
            texts, index_P = distinct(side_texts)
            embeds_BTD, mask_BT = wan_text.encode(texts, self.tokenizer, self.text_encoder)
            index_P = index_P.to(embeds_BTD.device)
            sampler.conditioning |= {
                f"{side}prompt_embeds": embeds_BTD[index_P].to(self.od_config.dtype),
                f"{side}prompt_mask": mask_BT[index_P],
            }

    def _encode_images(self, sampler: BatchSampler) -> None:
        """Encode each distinct request's images once, as the groups' conditioning."""
        sampling = sampler.sampling
        requested, index_P = distinct([request.images for request in sampler.requests])
        latents = []
        for images in requested:
            pixels = pixels_of(images, sampling.images)
            latents.append(
                self.adapter.image_latents(partial(encode_images, self.vae), pixels, sampling)
            )
        sampler.conditioning[IMAGE_LATENTS] = torch.cat(latents)[index_P.to(self.device)]

    def _denoised(self, sampler: BatchSampler) -> Tensor:
        """Return latents [N, C, F, H, W] at sigma 0.

        A step's velocity is the trainer's: the same function, expert and scale.
        """
        sampling = sampler.sampling
        conditioning = {
            name: sampler.per_row(value_P) for name, value_P in sampler.conditioning.items()
        }

        latents_NLC = sampler.initial_latents()
        # on the host at once: to read a sigma later would wait for the GPU
        for sigma in sampler.schedule[:-1].tolist():
            component = self.adapter.component_of(sigma)
            rows_B, index_N = sampler.distinct_rows()
            velocity_BLC = self.adapter.velocity(
                getattr(self, component),
                latents_NLC[rows_B],
                sampler.model_sigma(len(rows_B), torch.float32),
                {name: value_N[rows_B] for name, value_N in conditioning.items()},
                sampling,
                component=component,
            )
            latents_NLC = sampler.step(velocity_BLC[index_N], latents_NLC)

        # the given frames go in front again, clean
        given = [conditioning[IMAGE_LATENTS].to(latents_NLC)] if sampling.images else []
        return unpack(torch.cat([*given, latents_NLC], dim=1), self.adapter.grid(sampling))

    def _decoded(self, latents_NCFHW: Tensor) -> Tensor:
        """Decode to [N, F, H, W, 3] uint8 on the CPU, rounded as the stock frames are."""
        vae = self.vae
        mean, std = latent_statistics(vae, self.device)
        frames, height, width = latents_NCFHW.shape[2:]

        num_rows = self.adapter.decoding.num_rows(
            self.device.type,
            # at most: the first latent frame is decoded to one frame only
            num_frames=frames * self.adapter.temporal,
            height=height * self.adapter.spatial,
            width=width * self.adapter.spatial,
        )

        batches = (latents_NCFHW.float() * std + mean).to(vae.dtype).split(num_rows)
        # A few rows at a time: the VAE's activations take hundreds of times a video's memory. Each
        # goes to the CPU at once: all in the decoder's dtype would take more than the latents.
        videos = []
        for rows_BCFHW in batches:
            (decoded_B3FHW,) = vae.decode(rows_BCFHW, return_dict=False)[:1]
            videos.append(to_uint8(decoded_B3FHW).permute(0, 2, 3, 4, 1).contiguous().cpu())
        return torch.cat(videos)
