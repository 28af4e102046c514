"""Advantages relative to the prompt group."""

from __future__ import annotations

from collections.abc import Callable, Mapping

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
    `train.selection.groups_to_train` says which of those are computed, so that ranks stay in step.
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


def gdpo_advantages(
    rewards: Mapping[str, Tensor],
    weights: Mapping[str, float],
    *,
    all_reduce: Callable[[Tensor], Tensor] = lambda value: value,
) -> tuple[Tensor, Tensor]:
    """Return (advantages_PG, weights_P), float32: each reward counts by its weight, not its spread.

    Each reward is normalised within its group, as kind=group does. The weighted sum is divided by
    its root mean square over the groups with a signal, of all ranks. all_reduce sums a [2] float64
    tensor over the data-parallel group (once).
    rewards: name → [P, G]. weights: of those that take part; 0 is as good as left out.
    A group whose normalised rewards cancel gets weight 0 and keeps its row.
    GDPO, arXiv 2601.05242.
    """
    combined_PG = torch.zeros_like(next(iter(rewards.values())), dtype=torch.float64)
    for name, weight in weights.items():
        advantages_PG, signal_P = group_advantages(rewards[name], kind="group")
        # rewards that differ by rounding are equal, though division by their std makes them large
        combined_PG += weight * signal_P[:, None] * advantages_PG.double()
    has_signal_P = combined_PG.abs().amax(dim=1) > ZERO_STD

    # without the others, which are 0: how many of them a batch has must not scale the rest
    signal_PG = combined_PG[has_signal_P]
    moments = [signal_PG.square().sum(), float(signal_PG.numel())]
    squares, count = all_reduce(torch.tensor(moments, dtype=torch.float64))
    rms = (squares / count.clamp(min=1)).sqrt()
    return (combined_PG / (rms + EPSILON)).float(), has_signal_P.float()
