"""Choose the blocks that keep their activations for backward; the others compute them again."""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from megadiff.parallel.plan import ParallelPlan

_ROUNDING = 1e-9  # 60 · 0.15 is a little less than 9


def recompute_blocks(module: nn.Module, plan: ParallelPlan, *, budget: float) -> None:
    """Recompute all blocks but the fraction `budget`, which keep their activations.

    module: diffusers' transformer, or a class made from it.
    """
    if budget >= 1:
        return

    blocks = [block for name, block in module.named_modules() if plan.is_block(name)]
    keeping = kept_blocks(len(blocks), budget)
    recomputed = {block for index, block in enumerate(blocks) if index not in keeping}

    enable = module.enable_gradient_checkpointing
    enable(partial(_called, recomputed))  # type: ignore[operator]  # diffusers' ModelMixin has it


def kept_blocks(count: int, budget: float) -> set[int]:
    """Return the blocks of 0 … count − 1 that keep their activations.

    They are floor(count · budget), evenly spread, the last block among them.
    """
    up_to = [math.floor(index * budget + _ROUNDING) for index in range(count + 1)]
    return {index for index in range(count) if up_to[index + 1] > up_to[index]}


def _called(recomputed: Collection[nn.Module], block: nn.Module, *args: Any) -> Any:
    if block not in recomputed:
        return block(*args)
    # nothing random happens in a block, so no generator's state is kept for the second time
    return checkpoint(block, *args, use_reentrant=False, preserve_rng_state=False)
