"""A model family outside of megadiff: a Qwen-Image whose schedule has one shift for all sizes.

megadiff train CONFIG.yaml model.family=examples.static_shift:StaticShiftAdapter …
"""

from __future__ import annotations

from megadiff.models.guided_family import GuidedFamily
from megadiff.models.qwen_image.adapter import QwenImageAdapter


class StaticShiftAdapter(QwenImageAdapter):
    """Take the shift from the folder's scheduler; the rest is Qwen-Image's.

    The replica's side is Qwen-Image's pipeline. It asks its adapter, which is this one, for the
    schedule.
    """

    title = "static Qwen-Image"
    pipeline_class = "StaticShiftPipeline"
    # of every family that says nothing else
    schedule = GuidedFamily.schedule
    shift = GuidedFamily.shift
