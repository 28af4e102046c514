"""Which blocks of a transformer keep their activations for the backward, and which compute them a second time."""

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
    """All blocks but a share of `budget`, which keep their activations. module: diffusers' transformer, or one made from it."""
    if budget >= 1:
        return
    blocks = {
        plan.block_of(name): block for name, block in module.named_modules() if plan.is_block(name)
    }
    kept = kept_blocks(len(blocks), budget)
    module.enable_gradient_checkpointing(
        partial(_called, {block for index, block in blocks.items() if index not in kept})
    )


def kept_blocks(count: int, budget: float) -> set[int]:
    """Of blocks 0 … count − 1 those that keep their activations: floor(count · budget), evenly spread, the last among them."""
    up_to = [math.floor(index * budget + _ROUNDING) for index in range(count + 1)]
    return {index for index in range(count) if up_to[index + 1] > up_to[index]}


def _called(recomputed: Collection[nn.Module], block: nn.Module, *args: Any) -> Any:
    """Nothing random happens in a block, so no generator's state is kept for the second time."""
    if block not in recomputed:
        return block(*args)
    return checkpoint(block, *args, use_reentrant=False, preserve_rng_state=False)
