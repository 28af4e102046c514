"""Give the rules by which Qwen-Image-Edit's weights are sharded and loaded. Data only."""

from __future__ import annotations

from dataclasses import replace

from megadiff.models.qwen_image.plan import PLAN as IMAGE_PLAN
from megadiff.models.qwen_image.plan import SERVED_NAMES as SERVED_NAMES

# With zero_cond_t forward numbers the tokens of all images, 0 those of the drawn one; without it
# the argument is None.
PLAN = replace(IMAGE_PLAN, block_tokens=("modulate_index",))
