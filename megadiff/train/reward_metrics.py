"""Reduce a step's rewards over the ranks to the figures that are logged."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch

from megadiff.algorithms.advantage import EPSILON, group_moments, has_signal
from megadiff.parallel.collectives import all_reduce_sums, gather_json
from megadiff.parallel.mesh import Mesh
from megadiff.rewards.score import TOTAL
from megadiff.train.sampling import Rewards
from megadiff.types import Figures

COUNTS = ("dropped", "retries")  # of a reward's own figures: summed over the ranks, not averaged


def reward_metrics(rewards: Rewards, own: Sequence[dict[str, Figures]], mesh: Mesh) -> Figures:
    """Return the global mean of every reward, how it spreads, and its own figures. Collective.

    Of the total, and of each of several rewards: the mean std within groups, and the share of
    groups without signal. Samples without a score are left out, and so is a reward that no prompt
    of the step asks for.
    own: reward name → its own figures, of each scorer that scored; only model groups' first ranks
    have any.
    """
    sums: Figures = {}
    for name, value_PG in rewards.items():
        sums |= {f"{name}/{key}": value for key, value in _sums(value_PG).items()}
    # model-parallel peers count alike, so numerators and counts scale together
    sums = all_reduce_sums(sums, mesh.cpu_group)

    metrics: Figures = {}
    for name in rewards:
        count = sums[f"{name}/count"]
        if not count:
            continue
        mean = sums[f"{name}/sum"] / count
        num_groups = sums[f"{name}/groups"]
        spread = {
            "group_std": sums[f"{name}/group_std"] / num_groups,
            "zero_std_ratio": sums[f"{name}/zero_std"] / num_groups,
        }
        if name == TOTAL:
            variance = sums[f"{name}/squares"] / count - mean**2
            # by rounding it may be below zero
            metrics |= {"reward/mean": mean, "reward/std": max(variance, 0.0) ** 0.5}
            metrics |= {f"reward/{key}": value for key, value in spread.items()}
            continue
        metrics[f"reward/{name}"] = mean
        if len(rewards) > 2:  # else the total says the same
            metrics |= {f"reward/{name}/{key}": value for key, value in spread.items()}
    return metrics | _own_figures(own, mesh)


def _sums(value_PG: torch.Tensor) -> Figures:
    # float64: a variance is the difference of two large sums
    value_PG = value_PG.double()
    known_PG = ~value_PG.isnan()
    asked_P = known_PG.any(dim=1)
    mean_P1, group_std_P1 = group_moments(value_PG)
    has_signal_P1 = has_signal(mean_P1, group_std_P1)
    filled_PG = torch.where(known_PG, value_PG, 0.0)
    return {
        "sum": float(filled_PG.sum()),
        "squares": float((filled_PG**2).sum()),
        "count": float(known_PG.sum()),
        "groups": float(asked_P.sum()),
        "group_std": float(group_std_P1.sum()),
        "zero_std": float((~has_signal_P1[asked_P]).sum()),
    }


def _own_figures(own: Sequence[dict[str, Figures]], mesh: Mesh) -> Figures:
    """Return reward/<name>/<key>, and the seconds under time/. Collective."""
    ranks = list(chain.from_iterable(gather_json(list(own), mesh.cpu_group)))
    metrics: Figures = {}
    for name in ranks[0]:
        # a rank may lack a key that others have
        keys = {key: None for figures in ranks for key in figures[name]}
        for key in keys:
            values = [figures[name][key] for figures in ranks if key in figures[name]]
            total = sum(values)
            if key == "seconds":
                metrics[f"time/reward_{name}_s"] = total / len(values)
            elif key in COUNTS:
                metrics |= {f"reward/{name}/{key}": total} if total else {}
            else:
                metrics[f"reward/{name}/{key}"] = total / len(values)
    return metrics


def shares_of_advantage(
    rewards: Rewards, advantages_PG: torch.Tensor, weights: dict[str, float], mesh: Mesh
) -> Figures:
    """Return each reward's correlation with the advantage, where several have a weight. Collective.

    The reward is normalised within its group. 0 is one that the update does not hear.
    """
    weighted = [name for name, weight in weights.items() if weight]
    if len(weighted) < 2:
        return {}

    advantages_PG = advantages_PG.double()
    sums: Figures = {"aa": float(advantages_PG.square().sum())}
    for name in weighted:
        value_PG = rewards[name].double()
        mean_P1, std_P1 = group_moments(value_PG)
        z_PG = ((value_PG - mean_P1) / (std_P1 + EPSILON)).nan_to_num(0.0)
        sums[f"{name}/az"] = float((advantages_PG * z_PG).sum())
        sums[f"{name}/zz"] = float(z_PG.square().sum())
    sums = all_reduce_sums(sums, mesh.cpu_group)

    # both have a mean of 0 in every group, so this is their correlation
    shares = {}
    for name in weighted:
        scale = (sums["aa"] * sums[f"{name}/zz"]) ** 0.5
        shares[f"reward/{name}/share_of_advantage"] = sums[f"{name}/az"] / scale if scale else 0.0
    return shares
