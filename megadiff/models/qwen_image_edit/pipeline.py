"""Run Qwen-Image-Edit inside vllm-omni. Loaded by the replica under its dotted name.

Tested with vllm-omni 0.28.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from vllm_omni.diffusion.models.qwen_image import pipeline_qwen_image_edit_plus as stock

from megadiff.models.qwen_image.pipeline import QwenImageRolloutMixin
from megadiff.models.qwen_image_edit import text as edit_text


class QwenImageEditRolloutPipeline(QwenImageRolloutMixin, stock.QwenImageEditPlusPipeline):
    def __init__(self, *, od_config: Any, prefix: str = "") -> None:
        # the stock one needs torchvision, for videos
        with patch.object(stock, "Qwen2VLProcessor", edit_text.PictureProcessor):
            super().__init__(od_config=od_config, prefix=prefix)
