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
    kind: str,
    all_reduce: Callable[[Tensor], Tensor] = lambda value: value,
) -> tuple[Tensor, Tensor]:
    """Return (advantages_PG, weights_P), float32: (reward − group mean) / (std + 1e-4).

    kind: global takes the population std over the batch of all ranks, for which all_reduce sums a
    [3] float64 tensor over the data-parallel group (once). group takes each group's own.
    none divides by nothing.
    A group whose rewards are all equal gets weight 0 and keeps its row.
    `train.update.groups_to_train` says which of those are computed, so that ranks stay in step.
    Flow-GRPO, arXiv 2505.05470; none as in Dr. GRPO, arXiv 2503.20783.
    """
    # float64, because the mean of near-equal rewards cancels most of float32's digits
    rewards_PG = rewards_PG.double()
    centred_PG = rewards_PG - rewards_PG.mean(dim=1, keepdim=True)
    group_std_P1 = rewards_PG.std(dim=1, keepdim=True, correction=0)
    weights_P = (group_std_P1[:, 0] > ZERO_STD).float()
    if kind == "none":
        return centred_PG.float(), weights_P

    std = group_std_P1
    if kind == "global":
        moments = [float(rewards_PG.numel()), rewards_PG.sum(), (rewards_PG**2).sum()]
        count, total, squares = all_reduce(torch.tensor(moments, dtype=torch.float64))
        # rounding can bring the variance of equal rewards below 0
        std = (squares / count - (total / count) ** 2).clamp(min=0).sqrt()
    return (centred_PG / (std + EPSILON)).float(), weights_P
