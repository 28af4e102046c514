"""Advantages relative to the prompt group."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

EPSILON = 1e-4  # Flow-GRPO adds it to the standard deviation
ZERO_STD = 1e-6  # rewards in a group closer than this carry no signal


def group_advantages(
    rewards_PG: Tensor,
    *,
    global_std: bool,
    all_reduce: Callable[[Tensor], Tensor] = lambda value: value,
) -> tuple[Tensor, Tensor]:
    """(advantages_PG, weights_P), float32: (reward − group mean) / (std + 1e-4). Flow-GRPO, arXiv 2505.05470.

    std is each group's own, or with global_std the population std over the batch of all ranks, for which all_reduce sums a
    [3] float64 tensor over the data-parallel group (once). A group whose rewards are all equal gets weight 0 and keeps
    its place; `train.update.groups_to_train` says which of them are computed, as many on every rank.
    """
    rewards_PG = rewards_PG.double()
    centred_PG = rewards_PG - rewards_PG.mean(dim=1, keepdim=True)
    group_std_P1 = rewards_PG.std(dim=1, keepdim=True, correction=0)
    weights_P = (group_std_P1[:, 0] > ZERO_STD).float()
    std = global_standard_deviation(rewards_PG, all_reduce) if global_std else group_std_P1
    return (centred_PG / (std + EPSILON)).float(), weights_P


def global_standard_deviation(rewards_PG: Tensor, all_reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Population std over all ranks, a float64 scalar, from one all-reduce of (count, sum, sum of squares)."""
    rewards_PG = rewards_PG.double()
    moments = torch.stack(
        [torch.tensor(float(rewards_PG.numel())).double(), rewards_PG.sum(), (rewards_PG**2).sum()]
    )
    count, total, squares = all_reduce(moments)
    return (squares / count - (total / count) ** 2).clamp(min=0).sqrt()
