"""The policy update of one step: reference means, then the optimizer steps over the rollout batch."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from megadiff.algorithms import Algorithm
from megadiff.algorithms.advantage import group_advantages
from megadiff.config.schema import Config
from megadiff.engines.base import Engine
from megadiff.parallel.collectives import all_reduce_max, all_reduce_sums, sum_tensor
from megadiff.parallel.mesh import Mesh
from megadiff.train.batch import to_train_batch, update_parts
from megadiff.types import RolloutGroup, TrainBatch


def update(
    engine: Engine,
    algorithm: Algorithm,
    groups: list[RolloutGroup],
    rewards_PG: torch.Tensor,
    *,
    config: Config,
    mesh: Mesh,
    recompute: bool,
) -> dict[str, float]:
    """Collective. train.updates_per_step optimizer steps; returns the engine's figures, averaged over them.

    recompute: old log_probs are this engine's, from before the first of them, and not the replicas', which drew the samples.
    """
    advantages_PG, weights_P = group_advantages(
        rewards_PG,
        global_std=config.algorithm.global_std,
        all_reduce=lambda value: sum_tensor(value, mesh.dp_group),
    )
    kept = groups_to_train(groups, weights_P, config=config, mesh=mesh)
    batch = to_train_batch([groups[index] for index in kept], advantages_PG[kept], weights_P[kept])
    if algorithm.needs_reference:
        with engine.reference():
            batch = replace(batch, ref_means_NWLC=engine.log_probs(batch).means_NWLC)
    parts = update_parts(batch, group_size=config.algorithm.group_size, num_updates=config.train.updates_per_step)
    del batch  # parts are copies
    if recompute:
        parts = with_own_log_probs(engine, parts)
    stats = [engine.update(with_denominator(part, mesh), algorithm.loss) for part in parts]
    found = {key: [stat[key] for stat in stats if key in stat] for stat in stats for key in stat}
    return {key: sum(values) / len(values) for key, values in found.items()}


def groups_to_train(groups: list[RolloutGroup], weights_P: torch.Tensor, *, config: Config, mesh: Mesh) -> list[int]:
    """Collective. Indices, rising, of this rank's groups that an update computes: those with a weight, and of the others, which
    add nothing to a gradient or a figure, as many as give every rank equally many and, where there are enough, full
    microbatches; one microbatch where no rank has a weight."""
    rows = len(groups[0].trajectories) // config.train.updates_per_step * len(groups[0].trajectories[0].log_probs)
    most = all_reduce_max({"groups": float((weights_P > 0).sum())}, mesh.cpu_group)["groups"]
    size = config.train.microbatch_size
    step = size // math.gcd(size, rows)  # groups whose rows fill whole microbatches
    count = min(max(math.ceil(most / step), 1) * step, len(groups))
    return sorted(torch.argsort(weights_P, descending=True, stable=True)[:count].tolist())


def with_own_log_probs(engine: Engine, parts: list[TrainBatch]) -> list[TrainBatch]:
    """Collective. The parts of a rollout batch with the engine's log_probs as the old ones; the replicas' weigh the policy
    gradient.

    The first part is trained by the very policy that is asked for, so its forwards answer themselves. Each of the others takes
    one more, in the microbatches of its update: padded as there, they round alike.
    """
    own = [replace(part, old_log_probs_NW=None, rollout_log_probs_NW=part.old_log_probs_NW) for part in parts]
    return own[:1] + [replace(part, old_log_probs_NW=engine.log_probs(part).log_probs_NW) for part in own[1:]]


def with_denominator(batch: TrainBatch, mesh: Mesh) -> TrainBatch:
    """denominator = weighted samples over all dp ranks × window steps. A mean of per-rank means would be wrong."""
    weight = all_reduce_sums({"weight": float(batch.weights_N.sum())}, mesh.cpu_group)["weight"] / (mesh.sp * mesh.tp)
    return replace(batch, denominator=max(weight, 1.0) * batch.num_window_steps)
