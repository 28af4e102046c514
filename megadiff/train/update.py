"""Run a step's policy update: from scored groups to optimizer steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from megadiff.algorithms import LAGGING, OLD, Algorithm
from megadiff.algorithms.advantage import gdpo_advantages, group_advantages
from megadiff.config.schema import Config
from megadiff.engines.engine import Engine
from megadiff.engines.microbatch import Batch
from megadiff.engines.sharded import NonFiniteError
from megadiff.parallel.collectives import all_reduce_sums, sum_tensor
from megadiff.parallel.mesh import Mesh
from megadiff.rewards.score import TOTAL
from megadiff.train.policies import follow, with_old_policy, with_other_policies
from megadiff.train.reward_metrics import shares_of_advantage
from megadiff.train.rows import ROWS, rows_per_group, update_parts
from megadiff.train.sampling import Rewards
from megadiff.train.selection import ScoredGroups, best_and_worst, groups_to_train
from megadiff.train.step_over import step_over
from megadiff.types import Figures, Progress, RolloutGroup


def update(
    engine: Engine,
    algorithm: Algorithm,
    groups: list[RolloutGroup],
    rewards: Rewards,
    *,
    progress: Progress,
) -> tuple[Figures, list[RolloutGroup]]:
    """Take train.updates_per_step optimizer steps. Collective.

    Returns the engine's figures, averaged over them, and the groups that it computed: those without
    a signal are left out.
    progress: recomputes says whose the old log_probs are: this engine's, from before the first of
    them, or those of the replicas, which drew the samples. skipped counts batches that are stepped
    over, at most optim.skip_nonfinite.
    Raises NonFiniteError that names the step, and the prompts with the largest rewards.
    """
    config = engine.config
    mesh = engine.mesh
    settings = config.algorithm
    advantages_PG, weights_PG = step_advantages(rewards, config=config, mesh=mesh)
    reward_weights = {name: reward.weight for name, reward in config.reward.items()}
    shares = shares_of_advantage(rewards, advantages_PG, reward_weights, mesh)
    if LAGGING in algorithm.needs:  # equal rewards still pull towards the lagging policy
        weights_PG = rewards[TOTAL].isfinite().float()
    indices = groups_to_train(
        weights_PG, rows=rows_per_group(config, algorithm), config=config, mesh=mesh
    )
    trained = [groups[index] for index in indices]
    scored = ScoredGroups(
        groups=trained,
        advantages_PG=advantages_PG[indices],
        weights_PG=weights_PG[indices],
        seed=config.seed,
        step=progress.step,
    )
    if settings.trained_samples:
        scored = best_and_worst(
            scored, settings.trained_samples, num_updates=config.train.updates_per_step
        )

    batch = with_other_policies(engine, algorithm, ROWS[algorithm.rows](scored, config, algorithm))
    parts = update_parts(batch, num_updates=config.train.updates_per_step)
    del batch  # parts are copies, and two of all latents need not stay
    if OLD in algorithm.needs or progress.recomputes:
        parts = with_old_policy(engine, parts, weighs=progress.recomputes)

    stats = []
    for part in parts:
        try:
            stats.append(engine.update(with_denominator(part, mesh), algorithm.loss))
        except NonFiniteError as error:
            step_over(error, groups, rewards, engine=engine, progress=progress)
    follow(engine)
    engine.offload(waits=False)  # beside what is left of the step; replicas are awake in the next

    figures = mean_of_dicts(stats) | shares
    if config.optim.skip_nonfinite:
        figures["optim/skipped_batches"] = float(progress.skipped)
    return figures, trained


def with_denominator(batch: Batch, mesh: Mesh) -> Batch:
    """Set the denominator: weighted samples over all dp ranks × rows of each. Collective."""
    # a mean of the ranks' means would be wrong where their weights differ
    weights = all_reduce_sums({"weight": float(batch.weights_N.sum())}, mesh.cpu_group)
    weight = weights["weight"] / (mesh.sp * mesh.tp)  # model-parallel peers have the same samples
    rows = batch.num_rows // len(batch.weights_N)
    return replace(batch, denominator=max(weight, 1.0) * rows)


def step_advantages(
    rewards: Rewards, *, config: Config, mesh: Mesh
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (advantages_PG, weights_PG) of this rank's groups. Collective."""
    kind = config.algorithm.advantage
    all_reduce = partial(sum_tensor, group=mesh.dp_group)
    if kind == "gdpo":
        weights = {name: reward.weight for name, reward in config.reward.items()}
        scored_PG = rewards[TOTAL].isfinite()
        return gdpo_advantages(rewards, weights, scored_PG=scored_PG, all_reduce=all_reduce)
    return group_advantages(rewards[TOTAL], kind=kind, all_reduce=all_reduce)


def mean_of_dicts(rows: Sequence[Mapping[str, float]]) -> Figures:
    """Return the mean of each key over the rows that have it."""
    values = defaultdict(list)
    for row in rows:
        for key, value in row.items():
            values[key].append(value)
    return {key: sum(numbers) / len(numbers) for key, numbers in values.items()}
