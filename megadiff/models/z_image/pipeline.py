"""Run Z-Image inside vllm-omni with our schedule, noise and recorded window.

Loaded by the replica under its dotted name. Tested with vllm-omni 0.26 and 0.28.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from vllm_omni.diffusion.models.z_image import pipeline_z_image

from megadiff.models.pipeline_base import RolloutPipelineMixin, TransformerCall
from megadiff.models.z_image.adapter import filled
from megadiff.models.z_image.plan import SERVED_NAMES
from megadiff.tensors.model_files import read_json


class ZImageRolloutPipeline(RolloutPipelineMixin, pipeline_z_image.ZImagePipeline):
    served_names = SERVED_NAMES
    cast_networks = ("text_encoder", "vae")

    def __init__(self, *, od_config: Any, prefix: str = "") -> None:
        # the stock pipeline makes a transformer of 6 B, whatever transformer/config.json says
        stock = pipeline_z_image.ZImageTransformer2DModel
        config = read_json(Path(od_config.model) / "transformer" / "config.json")
        taken = inspect.signature(stock).parameters
        sizes = {key: value for key, value in config.items() if key in taken}
        pipeline_z_image.ZImageTransformer2DModel = partial(stock, **sizes)
        try:
            super().__init__(od_config=od_config, prefix=prefix)
        finally:
            pipeline_z_image.ZImageTransformer2DModel = stock
        self.device = self._execution_device

    def transformer_call(self, component: str) -> TransformerCall:
        call = super().transformer_call(component)
        return dataclasses.replace(call, forward=partial(by_filled_length, call.forward))


def by_filled_length(
    forward: Callable[..., Any],
    *,
    x: Sequence[Tensor],
    t: Tensor,
    cap_feats: Sequence[Tensor],
    return_dict: bool,
) -> tuple[list[Tensor]]:
    """Call vllm-omni's transformer once for each length to which texts are filled up.

    It has no attention mask, and turns all rows by the first one's positions, which begin after
    the row's text.
    """
    rows_of_length: dict[int, list[int]] = {}
    for row, text_TD in enumerate(cap_feats):
        rows_of_length.setdefault(filled(len(text_TD)), []).append(row)

    image_of_row: dict[int, Tensor] = {}
    for rows in rows_of_length.values():
        images, _ = forward([x[row] for row in rows], t[rows], [cap_feats[row] for row in rows])
        image_of_row |= zip(rows, images, strict=True)
    return ([image_of_row[row] for row in range(len(x))],)
