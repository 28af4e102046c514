"""Run a step's policy update: reference means, then optimizer steps over the rollout batch."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from megadiff.algorithms import Algorithm
from megadiff.algorithms.advantage import gdpo_advantages, group_advantages
from megadiff.config.schema import Config
from megadiff.engines.base import Engine, NonFiniteError
from megadiff.parallel.collectives import all_reduce_max, all_reduce_sums, gather_json, sum_tensor
from megadiff.parallel.mesh import Mesh
from megadiff.rewards.score import TOTAL
from megadiff.train.batch import to_train_batch, update_parts
from megadiff.train.sampling import Rewards
from megadiff.types import Figures, Progress, RolloutGroup, TrainBatch

logger = logging.getLogger(__name__)
SHOWN_PROMPTS = 3


def update(
    engine: Engine,
    algorithm: Algorithm,
    groups: list[RolloutGroup],
    rewards: Rewards,
    *,
    progress: Progress,
) -> Figures:
    """Take train.updates_per_step optimizer steps. Collective.

    Returns the engine's figures, averaged over them.
    progress: recomputes says whose the old log_probs are: this engine's, from before the first of
    them, or those of the replicas, which drew the samples. skipped counts batches that are stepped
    over, at most optim.skip_nonfinite.
    Raises NonFiniteError that names the step, and the prompts with the largest rewards.
    """
    config = engine.config
    mesh = engine.mesh
    advantages_PG, weights_P = step_advantages(rewards, config=config, mesh=mesh)
    indices = groups_to_train(groups, weights_P, config=config, mesh=mesh)
    batch = to_train_batch(
        [groups[index] for index in indices], advantages_PG[indices], weights_P[indices]
    )

    if algorithm.needs_reference:
        with engine.reference():
            batch = replace(batch, ref_means_NWLC=engine.log_probs(batch).means_NWLC)
    parts = update_parts(
        batch, group_size=config.algorithm.group_size, num_updates=config.train.updates_per_step
    )
    del batch  # parts are copies, and two of all latents need not stay

    if progress.recomputes:
        parts = with_own_log_probs(engine, parts)

    stats = []
    for part in parts:
        try:
            stats.append(engine.update(with_denominator(part, mesh), algorithm.loss))
        except NonFiniteError as error:
            step_over(error, groups, rewards, engine=engine, progress=progress)

    figures = mean_of_dicts(stats)
    if config.optim.skip_nonfinite:
        figures["optim/skipped_batches"] = float(progress.skipped)
    return figures


def step_advantages(
    rewards: Rewards, *, config: Config, mesh: Mesh
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (advantages_PG, weights_P) of this rank's groups. Collective."""
    kind = config.algorithm.advantage
    all_reduce = partial(sum_tensor, group=mesh.dp_group)
    if kind == "gdpo":
        weights = {name: reward.weight for name, reward in config.reward.items()}
        return gdpo_advantages(rewards, weights, all_reduce=all_reduce)
    return group_advantages(rewards[TOTAL], kind=kind, all_reduce=all_reduce)


def mean_of_dicts(rows: Sequence[Mapping[str, float]]) -> Figures:
    """Return the mean of each key over the rows that have it."""
    values = defaultdict(list)
    for row in rows:
        for key, value in row.items():
            values[key].append(value)
    return {key: sum(numbers) / len(numbers) for key, numbers in values.items()}


def step_over(
    error: NonFiniteError,
    groups: Sequence[RolloutGroup],
    rewards: Rewards,
    *,
    engine: Engine,
    progress: Progress,
) -> None:
    """Count a batch whose update was given up. Collective; the error came on every rank.

    Raises NonFiniteError with the largest rewards' prompts when optim.skip_nonfinite are used up.
    """
    mesh = engine.mesh
    ranks = gather_json(_largest_rewards(groups, rewards), mesh.cpu_group)
    largest = sorted((row for rows in ranks for row in rows), reverse=True)[:SHOWN_PROMPTS]
    shown = "; ".join(dict.fromkeys(f"{text} {value:.4g}" for _, value, text in largest))
    limit = engine.config.optim.skip_nonfinite
    text = f"step {progress.step + 1}: {error}. Largest rewards: {shown}"

    if progress.skipped >= limit:
        raise NonFiniteError(
            f"{text}. optim.skip_nonfinite={limit} batches may be stepped over, {progress.skipped} "
            "were; look at these rewards, lower optim.lr, or raise it"
        ) from error

    progress.skipped += 1
    if mesh.rank == 0:
        logger.warning(
            "%s. Stepped over, %d of optim.skip_nonfinite=%d", text, progress.skipped, limit
        )


def _largest_rewards(
    groups: Sequence[RolloutGroup], rewards: Rewards
) -> list[tuple[float, float, str]]:
    """Return (magnitude, value, "reward 'name' of prompt 'text'") of this rank's largest."""
    rows = []
    for name in rewards.keys() - {TOTAL}:
        for group, values_G in zip(groups, rewards[name].double(), strict=True):
            value = values_G[values_G.abs().argmax()].item()
            rows.append((abs(value), value, f"{name!r} of prompt {group.prompt.text[:60]!r}"))
    return sorted(rows, reverse=True)[:SHOWN_PROMPTS]


def groups_to_train(
    groups: list[RolloutGroup], weights_P: torch.Tensor, *, config: Config, mesh: Mesh
) -> list[int]:
    """Return the indices, rising, of this rank's groups that an update computes. Collective.

    Groups without a weight add nothing to a gradient or a figure and are dropped. Some of them stay
    so that every rank has equally many groups and, where there are enough, full microbatches. One
    microbatch stays where no rank has a weight.
    """
    group_size, num_steps = groups[0].log_probs_GW.shape
    rows = group_size // config.train.updates_per_step * num_steps
    most = all_reduce_max({"groups": float((weights_P > 0).sum())}, mesh.cpu_group)["groups"]
    size = config.train.microbatch_size
    step = size // math.gcd(size, rows)  # groups whose rows fill whole microbatches
    count = min(max(math.ceil(most / step), 1) * step, len(groups))
    return sorted(torch.argsort(weights_P, descending=True, stable=True)[:count].tolist())


def with_own_log_probs(engine: Engine, parts: list[TrainBatch]) -> list[TrainBatch]:
    """Return the parts with the engine's log_probs as the old ones. Collective.

    The replicas' then weigh the policy gradient.
    """
    recomputed = []
    for index, part in enumerate(parts):
        # The first update trains the very policy that is asked for: its forwards answer themselves.
        # The others take one more forward in the microbatches of their update, to round alike.
        replicas_NW = part.old_log_probs_NW
        part = replace(part, old_log_probs_NW=None, rollout_log_probs_NW=replicas_NW)
        if index:
            part = replace(part, old_log_probs_NW=engine.log_probs(part).log_probs_NW)
        recomputed.append(part)
    return recomputed


def with_denominator(batch: TrainBatch, mesh: Mesh) -> TrainBatch:
    """Set the denominator: weighted samples over all dp ranks × window steps. Collective."""
    # a mean of the ranks' means would be wrong where their weights differ
    weights = all_reduce_sums({"weight": float(batch.weights_N.sum())}, mesh.cpu_group)
    weight = weights["weight"] / (mesh.sp * mesh.tp)  # model-parallel peers have the same samples
    return replace(batch, denominator=max(weight, 1.0) * batch.num_window_steps)
