"""Choose what an update trains on: groups with a signal, and a group's best and worst samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megadiff.config.schema import Config
from megadiff.diffusion import noise
from megadiff.parallel.collectives import all_reduce_max
from megadiff.parallel.mesh import Mesh
from megadiff.types import RolloutGroup


@dataclass(frozen=True, kw_only=True)
class ScoredGroups:
    """Hold groups of one size with what they are worth.

    advantages_PG, weights_PG: float32, as from group_advantages. seed, step: of the noise identity.
    """

    groups: Sequence[RolloutGroup]
    advantages_PG: Tensor
    weights_PG: Tensor
    seed: int
    step: int

    def sample_keys(self, index: int) -> list[str]:
        """Return the identities of a group's samples, from which all their draws follow."""
        group = self.groups[index]
        key = noise.group_key(seed=self.seed, step=self.step, prompt_id=group.prompt.id)
        return noise.sample_keys(key, group.sample_indices)


def best_and_worst(scored: ScoredGroups, count: int, *, num_updates: int = 1) -> ScoredGroups:
    """Keep a group's best ⌈count/2⌉ and worst ⌊count/2⌋ samples.

    They come in turns, best, worst, second best, …: updates take equal parts in this order, and
    each needs both. DanceGRPO's best-of-n, arXiv 2505.07818. Samples without a score come last in
    each part, so that no update has many more of them than another.
    num_updates: divides count.
    """
    order_PG = scored.advantages_PG.argsort(dim=1, descending=True, stable=True)
    kept_PG = torch.stack(
        [
            _best_and_worst(order_G, scored_G, count, num_updates=num_updates)
            for order_G, scored_G in zip(order_PG, scored.weights_PG > 0, strict=True)
        ]
    )
    groups = [
        take_samples(group, kept_G) for group, kept_G in zip(scored.groups, kept_PG, strict=True)
    ]
    return replace(
        scored,
        groups=groups,
        advantages_PG=scored.advantages_PG.gather(1, kept_PG),
        weights_PG=scored.weights_PG.gather(1, kept_PG),
    )


def _best_and_worst(order_G: Tensor, scored_G: Tensor, count: int, *, num_updates: int) -> Tensor:
    """Return `count` indices of a group. order_G: its indices by falling advantage."""
    # A group whose rewards are equal has no weights at all.
    is_scored_G = scored_G[order_G] | ~scored_G.any()
    ranked_G = order_G[is_scored_G]
    num_ranked = min(count, len(ranked_G))
    num_best = (num_ranked + 1) // 2
    turns_G = torch.empty(num_ranked, dtype=torch.long)
    turns_G[0::2] = ranked_G[:num_best]
    turns_G[1::2] = ranked_G.flip(0)[: num_ranked - num_best]
    unscored_G = order_G[~is_scored_G][: count - num_ranked]

    turns = turns_G.tensor_split(num_updates)
    size = count // num_updates
    unscored = unscored_G.split([size - len(part_G) for part_G in turns])
    return torch.cat([torch.cat(part) for part in zip(turns, unscored, strict=True)])


def take_samples(group: RolloutGroup, index_G: Tensor) -> RolloutGroup:
    """Return the group with these of its samples."""
    return replace(
        group,
        sample_indices=tuple(group.sample_indices[index] for index in index_G.tolist()),
        latents_GSLC=group.latents_GSLC[index_G],
        log_probs_GW=group.log_probs_GW[index_G],
        pixels_GFHWC=group.pixels_GFHWC[index_G],
    )


def groups_to_train(weights_PG: Tensor, *, rows: int, config: Config, mesh: Mesh) -> list[int]:
    """Return the indices, rising, of this rank's groups that an update computes. Collective.

    Groups without a weight add nothing to a gradient or a figure and are dropped. Some of them stay
    so that every rank has equally many groups and, where there are enough, full microbatches. One
    microbatch stays where no rank has a weight.
    rows: of a group, over all updates of a step.
    """
    weights_P = weights_PG.amax(dim=1)
    rows = rows // config.train.updates_per_step
    most = all_reduce_max({"groups": float((weights_P > 0).sum())}, mesh.cpu_group)["groups"]
    size = config.train.microbatch_size
    step = size // math.gcd(size, rows)  # groups whose rows fill whole microbatches
    count = min(max(math.ceil(most / step), 1) * step, len(weights_P))
    return sorted(torch.argsort(weights_P, descending=True, stable=True)[:count].tolist())
