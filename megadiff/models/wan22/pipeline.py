"""Run Wan inside vllm-omni. Loaded by the replica under its dotted name.

Tested with vllm-omni 0.26 and 0.28.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from diffusers.image_processor import VaeImageProcessor
from PIL.Image import Image
from torch import Tensor
from vllm_omni.diffusion.layers.norm import RMSNormVAE
from vllm_omni.diffusion.models.wan2_2 import Wan22I2VPipeline, Wan22Pipeline, pipeline_wan2_2_i2v

from megadiff.models.pipeline_base import RolloutPipelineMixin
from megadiff.models.wan22.adapter import WanAdapter
from megadiff.models.wan22.plan import SERVED_NAMES
from megadiff.models.wan22.vae_norm import use_stock_norms


def to_tensor(image: Image) -> Tensor:
    """Return [C, H, W] float32 in [0, 1], as torchvision's function of this name does."""
    (pixels_CHW,) = VaeImageProcessor.numpy_to_pt(VaeImageProcessor.pil_to_numpy(image))
    return pixels_CHW


# the one function that plain requests need of torchvision, which CPU replicas lack
pipeline_wan2_2_i2v.TF = SimpleNamespace(to_tensor=to_tensor)


class WanRolloutMixin(RolloutPipelineMixin):
    """Give what text-to-video and image-to-video have alike."""

    adapter: WanAdapter
    served_names = SERVED_NAMES

    def __init__(self, *, od_config: Any, prefix: str = "") -> None:
        super().__init__(od_config=od_config, prefix=prefix)
        use_stock_norms(self.vae, RMSNormVAE)
        # of plain requests: vllm-omni takes 0.875 for every model
        self.boundary_ratio = self.adapter.boundary_ratio


class WanRolloutPipeline(WanRolloutMixin, Wan22Pipeline):
    pass


class WanImageToVideoRolloutPipeline(WanRolloutMixin, Wan22I2VPipeline):
    pass
