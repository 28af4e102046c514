"""Run Qwen-Image-Edit inside vllm-omni. Loaded by the replica under its dotted name.

Tested with vllm-omni 0.28.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from vllm_omni.diffusion.models.qwen_image import pipeline_qwen_image_edit_plus as stock

from megadiff.models.pipeline_base import RolloutPipelineMixin, TransformerCall
from megadiff.models.qwen_image.pipeline import with_text_widths
from megadiff.models.qwen_image.plan import SERVED_NAMES
from megadiff.models.qwen_image_edit import text as edit_text


class QwenImageEditRolloutPipeline(RolloutPipelineMixin, stock.QwenImageEditPlusPipeline):
    supports_step_execution = False
    served_names = SERVED_NAMES
    cast_networks = ("text_encoder", "vae")

    def __init__(self, *, od_config: Any, prefix: str = "") -> None:
        # the stock one needs torchvision, for videos
        with patch.object(stock, "Qwen2VLProcessor", edit_text.PictureProcessor):
            super().__init__(od_config=od_config, prefix=prefix)

    def transformer_call(self, component: str) -> TransformerCall:
        return with_text_widths(super().transformer_call(component))
