"""Adapt Wan2.2 I2V-A14B: a video from its first frame, which the transformer sees in channels.

As in WanImageToVideoPipeline of diffusers, every latent frame gets 20 channels beside its own 16:
a mask of 4, and the latents of a video that is the given frame and grey ever after.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megadiff.models.adapter import ImageEncoder
from megadiff.models.conditioning import IMAGE_LATENTS, Conditioning
from megadiff.models.packing import unpack
from megadiff.models.wan22.adapter import WanAdapter
from megadiff.types import Sampling

MASK_CHANNELS = 4  # one for each frame of a latent
LATENT_CHANNELS = 16
GREY = 127.5  # of 255: what the VAE's encoder sees as 0


class WanImageToVideoAdapter(WanAdapter):
    """Draw all frames of a video, the given first one as well."""

    title = "Wan2.2 I2V"
    published = {"Wan2.2 I2V-A14B, two experts": ""}
    pipeline_class = "WanImageToVideoPipeline"
    rollout_pipeline = "megadiff.models.wan22.pipeline:WanImageToVideoRolloutPipeline"
    needs_images = True
    needs_plain_image = True
    supervised_obstacle = "its given first frame would be all of a video of one frame"
    given_channels = MASK_CHANNELS + LATENT_CHANNELS

    def image_latents_shape(self, sampling: Sampling) -> tuple[int, int]:
        return self.latents_shape(sampling)

    def image_latents(
        self, encode: ImageEncoder, images: Sequence[Tensor], sampling: Sampling
    ) -> Tensor:
        """Return the latents of the given frame and grey ones, [1, tokens, C]."""
        (first_HWC,) = images
        size = (1, sampling.num_frames, *first_HWC.shape)
        video_BFHWC = torch.full(size, GREY, device=first_HWC.device)
        video_BFHWC[:, 0] = first_HWC
        return encode(video_BFHWC)

    def model_input(
        self,
        latents_BLC: Tensor,
        timestep_B: Tensor,
        conditioning: Conditioning,
        sampling: Sampling,
    ) -> tuple[Tensor, Tensor]:
        grid = self.grid(sampling)
        drawn_BCFHW = unpack(latents_BLC, grid)
        given_BCFHW = unpack(conditioning[IMAGE_LATENTS].to(latents_BLC), grid)
        mask_BCFHW = torch.zeros_like(drawn_BCFHW[:, :MASK_CHANNELS])
        mask_BCFHW[:, :, 0] = 1
        return torch.cat([drawn_BCFHW, mask_BCFHW, given_BCFHW], dim=1), timestep_B
