"""Which blocks of a transformer keep their activations for the backward, and which compute them a second time."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from megadiff.parallel.plan import ParallelPlan


def recompute_blocks(module: nn.Module, plan: ParallelPlan, *, every: int) -> None:
    """Of every `every` blocks the first is recomputed in backward. module: diffusers' transformer, or one made from it."""
    indices = {block: plan.block_of(name) for name, block in module.named_modules() if plan.is_block(name)}
    module.enable_gradient_checkpointing(partial(_called, indices, every))


def _called(indices: Mapping[nn.Module, int], every: int, block: nn.Module, *args: Any) -> Any:
    """Nothing random happens in a block, so no generator's state is kept for the second time."""
    if indices[block] % every:
        return block(*args)
    return checkpoint(block, *args, use_reentrant=False, preserve_rng_state=False)
