"""A model family outside of megadiff: a Qwen-Image whose schedule has one shift for all sizes.

megadiff train CONFIG.yaml model.family=examples.static_shift:StaticShiftAdapter …
"""

from __future__ import annotations

import torch
from torch import Tensor

from megadiff.models.qwen_image.adapter import QwenImageAdapter
from megadiff.tensors.model_files import read_json
from megadiff.types import Sampling


class StaticShiftAdapter(QwenImageAdapter):
    """Read the shift from the folder's scheduler; the rest is Qwen-Image's.

    The replica's side is Qwen-Image's pipeline: it asks its adapter, which is this one, for the
    schedule.
    """

    title = "Qwen-Image, static shift"
    pipeline_class = "StaticShiftPipeline"

    def schedule(self, sampling: Sampling) -> Tensor:
        sigmas = torch.linspace(1, 0, sampling.num_inference_steps + 1, dtype=torch.float64)
        return self.shift(sigmas, sampling).float()

    def shift(self, sigmas: Tensor, sampling: Sampling) -> Tensor:
        shift = read_json(self.model_folder / "scheduler" / "scheduler_config.json").get("shift")
        if not isinstance(shift, int | float) or shift <= 0:
            raise ValueError(
                f"{self.model_folder}/scheduler/scheduler_config.json has shift={shift!r}, which "
                "is no positive number; fetch it again"
            )
        return shift * sigmas / (1 + (shift - 1) * sigmas)
