"""Run Qwen-Image inside vllm-omni. Loaded by the replica under its dotted name.

Tested with vllm-omni 0.26 and 0.28.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm_omni.diffusion.models.qwen_image import QwenImagePipeline

from megadiff.models.pipeline_base import RolloutPipelineMixin, TransformerCall
from megadiff.models.qwen_image.plan import SERVED_NAMES


class QwenImageRolloutMixin(RolloutPipelineMixin):
    """Give what Qwen-Image and Qwen-Image-Edit have alike."""

    supports_step_execution = False
    served_names = SERVED_NAMES
    cast_networks = ("text_encoder", "vae")

    def transformer_call(self, component: str) -> TransformerCall:
        stock = super().transformer_call(component)

        def forward(*, encoder_hidden_states: Tensor, **kwargs: Any) -> Any:
            """Tell vllm-omni the text's width for each row: it makes rotary tables of it."""
            num_rows, width = encoder_hidden_states.shape[:2]
            return stock(
                encoder_hidden_states=encoder_hidden_states,
                txt_seq_lens=[width] * num_rows,
                **kwargs,
            )

        return TransformerCall(forward=forward, dtype=stock.dtype)


class QwenImageRolloutPipeline(QwenImageRolloutMixin, QwenImagePipeline):
    pass
