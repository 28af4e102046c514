"""Run Stable Diffusion 3 and 3.5 inside vllm-omni. Loaded by the replica under its dotted name.

Tested with vllm-omni 0.28.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm_omni.diffusion.models.sd3 import StableDiffusion3Pipeline

from megadiff.models.adapter import Images
from megadiff.models.pipeline_base import RolloutPipelineMixin
from megadiff.models.sd3.adapter import T5_TOKENS
from megadiff.models.sd3.plan import SERVED_NAMES
from megadiff.types import Tensors


class SD3RolloutPipeline(RolloutPipelineMixin, StableDiffusion3Pipeline):
    served_names = SERVED_NAMES

    def encode(self, texts: Sequence[str], images: Sequence[Images] = ()) -> Tensors:
        # "": each encoder gets the one text
        embeds_BTD, pooled_BD = self.encode_prompt(
            list(texts), "", "", max_sequence_length=T5_TOKENS
        )
        return {"prompt_embeds": embeds_BTD, "pooled_prompt_embeds": pooled_BD}
