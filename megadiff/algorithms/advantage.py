"""Advantages relative to the prompt group."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

EPSILON = 1e-4  # Flow-GRPO adds it to the standard deviation
ZERO_STD = 1e-6  # rewards in a group closer than this, or than rounding, carry no signal


def group_advantages(
    rewards_PG: Tensor,
    *,
    kind: str,
    all_reduce: Callable[[Tensor], Tensor] = lambda value: value,
) -> tuple[Tensor, Tensor]:
    """Return (advantages_PG, weights_PG), float32: (reward − group mean) / (std + 1e-4).

    rewards_PG: NaN is a sample without a reward: advantage and weight 0, no part in mean and std.
    kind: global takes the population std over the batch of all ranks, for which all_reduce sums a
    [3] float64 tensor (once). group takes each group's own, none divides by nothing.
    A group of equal rewards gets weight 0 and keeps its row, see `train.selection.groups_to_train`.
    Flow-GRPO, arXiv 2505.05470; none as in Dr. GRPO, arXiv 2503.20783.
    """
    # float64, because the mean of near-equal rewards cancels most of float32's digits
    rewards_PG = rewards_PG.double()
    scored_PG = ~rewards_PG.isnan()
    mean_P1, group_std_P1 = group_moments(rewards_PG)
    centred_PG = torch.where(scored_PG, rewards_PG - mean_P1, 0.0)
    weights_PG = (scored_PG & has_signal(mean_P1, group_std_P1)).float()
    if kind == "none":
        return centred_PG.float(), weights_PG

    std = group_std_P1
    if kind == "global":
        scored = rewards_PG[scored_PG]
        moments = [float(len(scored)), scored.sum(), (scored**2).sum()]
        count, total, squares = all_reduce(torch.tensor(moments, dtype=torch.float64))
        # of no scores NaN, and rounding can bring the variance of equal rewards below 0
        std = (squares / count - (total / count) ** 2).nan_to_num(0.0).clamp(min=0).sqrt()
    return (centred_PG / (std + EPSILON)).float(), weights_PG


def has_signal(mean_P1: Tensor, std_P1: Tensor) -> Tensor:
    """Tell which groups differ by more than ZERO_STD and more than float32 rounds, [P, 1] bool."""
    rounding_P1 = 4 * torch.finfo(torch.float32).eps * mean_P1.abs()
    return std_P1 > rounding_P1.clamp(min=ZERO_STD)


def group_moments(rewards_PG: Tensor) -> tuple[Tensor, Tensor]:
    """Return each group's mean and population std, [P, 1], without its NaN; 0 of nothing."""
    mean_P1 = rewards_PG.mean(dim=1, keepdim=True)
    std_P1 = rewards_PG.std(dim=1, keepdim=True, correction=0)
    scored_PG = ~rewards_PG.isnan()
    # a whole group keeps its digits, which a sum without its NaN may change
    for index in (scored_PG.any(dim=1) & ~scored_PG.all(dim=1)).nonzero():
        scored = rewards_PG[index][scored_PG[index]]
        mean_P1[index] = scored.mean()
        std_P1[index] = scored.std(correction=0)
    return mean_P1.nan_to_num(0.0), std_P1.nan_to_num(0.0)


def gdpo_advantages(
    rewards: Mapping[str, Tensor],
    weights: Mapping[str, float],
    *,
    scored_PG: Tensor | None = None,
    all_reduce: Callable[[Tensor], Tensor] = lambda value: value,
) -> tuple[Tensor, Tensor]:
    """Return (advantages_PG, weights_PG), float32: each reward by its weight, not its spread.

    Each reward is normalised as kind=group does. The weighted sum is divided by its root mean
    square over the groups with a signal, of all ranks. all_reduce sums a [2] float64 tensor (once).
    rewards: name → [P, G]; NaN adds nothing. weights: of those that take part.
    scored_PG: False for a sample that is left out as one of its rewards failed; None is no such.
    GDPO, arXiv 2601.05242.
    """
    combined_PG = torch.zeros_like(next(iter(rewards.values())), dtype=torch.float64)
    scored_PG = combined_PG == 0 if scored_PG is None else scored_PG
    for name, weight in weights.items():
        known_PG = torch.where(scored_PG, rewards[name], torch.nan)
        advantages_PG, signal_PG = group_advantages(known_PG, kind="group")
        # rewards that differ by rounding are equal, though division by their std makes them large
        combined_PG += weight * signal_PG * advantages_PG.double()
    has_signal_PG = scored_PG & (combined_PG.abs().amax(dim=1, keepdim=True) > ZERO_STD)

    # without the others: how many of them a batch has must not scale the rest
    signal = combined_PG[has_signal_PG]
    moments = [signal.square().sum(), float(len(signal))]
    squares, count = all_reduce(torch.tensor(moments, dtype=torch.float64))
    rms = (squares / count.clamp(min=1)).sqrt()
    return (combined_PG / (rms + EPSILON)).float(), has_signal_PG.float()
