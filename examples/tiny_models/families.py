"""List the tiny models that can be written, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from examples.tiny_models import bagel, qwen_image, qwen_image_edit, sd3, wan22, z_image

FAMILIES: dict[str, Callable[..., None]] = {
    "qwen_image": qwen_image.write_tiny_pipeline,
    "qwen_image_edit_2509": partial(qwen_image_edit.write_tiny_pipeline, kind="2509"),
    "qwen_image_edit_2511": partial(qwen_image_edit.write_tiny_pipeline, kind="2511"),
    "wan22_ti2v_5b": partial(wan22.write_tiny_pipeline, kind="ti2v_5b"),
    "wan22_t2v_a14b": partial(wan22.write_tiny_pipeline, kind="t2v_a14b"),
    "wan22_i2v_a14b": partial(wan22.write_tiny_pipeline, kind="i2v_a14b"),
    "wan21_t2v_1_3b": partial(wan22.write_tiny_pipeline, kind="t2v_1_3b"),
    "sd35_medium": partial(sd3.write_tiny_pipeline, kind="3_5_medium"),
    "sd35_large": partial(sd3.write_tiny_pipeline, kind="3_5_large"),
    "sd3_medium": partial(sd3.write_tiny_pipeline, kind="3_medium"),
    "z_image": z_image.write_tiny_pipeline,
    "bagel": bagel.write_tiny_bagel,
}
