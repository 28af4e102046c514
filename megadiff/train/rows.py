"""From scored groups to the rows that an engine trains on: stored steps, noise levels or pairs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megadiff.algorithms import Algorithm
from megadiff.config.schema import Config
from megadiff.diffusion import noise
from megadiff.engines.microbatch import Batch
from megadiff.models.conditioning import IMAGE_LATENTS
from megadiff.train.sampling import sampling_of, sft_sampling, unguided
from megadiff.train.selection import ScoredGroups, best_and_worst
from megadiff.types import FlowBatch, RolloutGroup, Sampling, TrainBatch


def rows_per_group(config: Config, algorithm: Algorithm) -> int:
    """Return how many rows a prompt's samples become, over all updates of a step."""
    settings = config.algorithm
    if algorithm.rows == "pairs":
        return 2 * settings.noise_levels
    num_samples = settings.trained_samples or settings.group_size
    if algorithm.rows == "levels":
        return num_samples * (settings.noise_levels if algorithm.on_policy else 1)
    return num_samples * (settings.trained_steps or config.rollout.sde_window_size)


def train_sampling(config: Config, algorithm: Algorithm) -> Sampling:
    """Return by which sampling an update's forwards run: without guidance where noise is drawn."""
    if not algorithm.on_policy:
        return sft_sampling(config.rollout)
    sampling = sampling_of(config.rollout)
    # what matches clean latents is the conditional velocity
    return sampling if algorithm.rows == "steps" else unguided(sampling)


def step_rows(scored: ScoredGroups, config: Config, algorithm: Algorithm) -> TrainBatch:
    """Make a row of each trained step of each sample.

    With algorithm.trained_steps those are drawn for each sample, by its identity.
    """
    batch = to_train_batch(scored.groups, scored.advantages_PG, scored.weights_PG)
    count = config.algorithm.trained_steps
    if not count:
        return batch
    keys: list[str] = []
    for index in range(len(scored.groups)):
        keys += scored.sample_keys(index)
    drawn = [
        noise.choice(batch.num_window_steps, count, key=f"{key}/trained_steps") for key in keys
    ]
    return replace(
        batch,
        trained_steps_NK=torch.stack(drawn),
        denominator=batch.denominator / batch.num_window_steps * count,
    )


def level_rows(scored: ScoredGroups, config: Config, algorithm: Algorithm) -> FlowBatch:
    """Noise each clean sample to noise_levels sigmas of its schedule, all different.

    A sample's rows follow each other. Levels and noise come from its identity.
    """
    count = config.algorithm.noise_levels
    latents = []
    level_keys = []
    sigmas = []
    for index, group in enumerate(scored.groups):
        latents.append(clean_latents(group).repeat_interleave(count, dim=0))
        for key in scored.sample_keys(index):
            sigmas.append(_levels(group, count, algorithm, key=key))
            level_keys += [f"{key}/level/{level}" for level in range(count)]
    rows = replace(
        scored,
        advantages_PG=scored.advantages_PG.repeat_interleave(count, dim=1),
        weights_PG=scored.weights_PG.repeat_interleave(count, dim=1),
    )
    return _flow_batch(rows, torch.cat(latents), torch.cat(sigmas), level_keys)


def pair_rows(scored: ScoredGroups, config: Config, algorithm: Algorithm) -> FlowBatch:
    """Noise a group's best and worst sample to the same noise_levels sigmas, by the same noise.

    Rows 2i and 2i + 1 are best and worst. A group without a difference has weight 0.
    """
    count = config.algorithm.noise_levels
    scored = best_and_worst(scored, 2)
    latents = []
    level_keys = []
    sigmas = []
    for index, group in enumerate(scored.groups):
        latents.append(clean_latents(group).repeat(count, 1, 1))
        # the best sample's identity is the pair's
        key = scored.sample_keys(index)[0]
        sigmas.append(_levels(group, count, algorithm, key=key).repeat_interleave(2))
        for level in range(count):
            level_keys += [f"{key}/level/{level}"] * 2
    rows = replace(
        scored,
        advantages_PG=scored.advantages_PG.repeat(1, count),
        weights_PG=scored.weights_PG.repeat(1, count),
    )
    return _flow_batch(rows, torch.cat(latents), torch.cat(sigmas), level_keys)


ROWS: dict[str, Callable[[ScoredGroups, Config, Algorithm], TrainBatch | FlowBatch]] = {
    "steps": step_rows,
    "levels": level_rows,
    "pairs": pair_rows,
}


def clean_latents(group: RolloutGroup) -> Tensor:
    """Return [G, L, C] float32, which a group has that was drawn without a window."""
    num_states = group.latents_GSLC.shape[1]
    assert num_states == 1, f"{num_states} states: a window's, and not the clean latents"
    return group.latents_GSLC[:, -1].float()


def _levels(group: RolloutGroup, count: int, algorithm: Algorithm, *, key: str) -> Tensor:
    """Draw `count` different sigmas of the schedule, [count] float32; never its 0."""
    sigmas = group.schedule[algorithm.first_level : -1]
    return sigmas[noise.choice(len(sigmas), count, key=f"{key}/levels")]


def _flow_batch(
    rows: ScoredGroups, latents_NLC: Tensor, sigma_N: Tensor, level_keys: Sequence[str]
) -> FlowBatch:
    """Join the rows of all groups. rows: advantages and weights have a column for each row."""
    groups = rows.groups
    conditioning = stack_conditioning([group.conditioning for group in groups])
    rows_per_group = len(sigma_N) // len(groups)
    weights_N = rows.weights_PG.reshape(-1)
    return FlowBatch(
        latents_NLC=latents_NLC,
        noise_NLC=noise.normal_rows(tuple(latents_NLC.shape[1:]), level_keys),
        sigma_N=sigma_N,
        advantages_N=rows.advantages_PG.reshape(-1),
        weights_N=weights_N,
        group_index_N=torch.arange(len(groups)).repeat_interleave(rows_per_group),
        # a negative prompt has no part in it, as sampling is without guidance
        conditioning={
            name: value_P
            for name, value_P in conditioning.items()
            if not name.startswith("negative_")
        },
        images_P=tuple(group.sampling.images for group in groups),
        sampling=unguided(groups[0].sampling),
        denominator=max(float(weights_N.sum()), 1.0),
    )


def to_train_batch(
    groups: Sequence[RolloutGroup], advantages_PG: Tensor, weights_PG: Tensor
) -> TrainBatch:
    """Join groups to one batch of all their window's steps, group by group.

    It stays on the CPU: the engine moves a microbatch at a time. denominator is this rank's alone;
    `update.with_denominator` makes it global.
    Raises ValueError for groups of unequal schedules.
    """
    first = groups[0]
    for group in groups[1:]:
        if not torch.equal(group.schedule, first.schedule):
            raise ValueError(f"{group.replica} sampled with another schedule than {first.replica}")

    group_size, num_steps = first.log_probs_GW.shape
    starts_P = torch.tensor([group.window_start for group in groups])
    weights_N = weights_PG.reshape(-1)

    return TrainBatch(
        latents_NSLC=torch.cat([group.latents_GSLC for group in groups]),
        old_log_probs_NW=torch.cat([group.log_probs_GW for group in groups]),
        window_start_N=starts_P.repeat_interleave(group_size),
        trained_steps_NK=torch.arange(num_steps).repeat(len(weights_N), 1),
        advantages_N=advantages_PG.reshape(-1),
        weights_N=weights_N,
        group_index_N=torch.arange(len(groups)).repeat_interleave(group_size),
        conditioning=stack_conditioning([group.conditioning for group in groups]),
        images_P=tuple(group.sampling.images for group in groups),
        schedule=first.schedule,
        sampling=first.sampling,
        denominator=max(float(weights_N.sum()), 1.0) * num_steps,
    )


def stack_conditioning(
    rows: Sequence[Mapping[str, Tensor]],
) -> dict[str, Tensor | Sequence[Tensor]]:
    """Join [1, tokens, …] tensors of several groups to one [P, max tokens, …] tensor a name.

    Shorter ones are padded with zeros (False in masks). Without a mask that says so padding would
    be taken for tokens: given images of unequal sizes stay a list.
    """
    stacked: dict[str, Tensor | Sequence[Tensor]] = {}
    for name in rows[0]:
        tensors = [row[name].squeeze(0) for row in rows]
        if name == IMAGE_LATENTS and len({len(tensor) for tensor in tensors}) > 1:
            stacked[name] = tensors
        else:
            stacked[name] = pad_sequence(tensors, batch_first=True)
    return stacked


def update_parts(batch: Batch, *, num_updates: int) -> list[Batch]:
    """Return the batches of num_updates updates, each with an equal part of every group.

    The split is by position in the group, so an update has the same samples under every layout.
    num_updates must divide a group's samples, or of a FlowBatch its rows. Conditioning and
    denominator stay.
    """
    num_columns = len(batch.weights_N)
    num_groups = int(batch.group_index_N.max()) + 1
    # [groups, updates, a group's rows of an update]
    index_PUR = torch.arange(num_columns).view(num_groups, num_updates, -1)

    def part(value: Any, name: str, index_N: Tensor) -> Any:
        # told by their letters, so that a column that is added later is split as well
        if not name.rpartition("_")[2].startswith("N"):
            return value
        if isinstance(value, Mapping):
            return {key: tensor[index_N] for key, tensor in value.items()}
        return value if value is None else value[index_N]

    parts = []
    for index_PR in index_PUR.unbind(1):
        index_N = index_PR.flatten()
        rows = {name: part(value, name, index_N) for name, value in vars(batch).items()}
        parts.append(replace(batch, **rows))
    return parts


def with_velocities(batch: Batch, name: str, velocities_RLC: Tensor) -> Batch:
    """Add the velocities of another policy under the name that Algorithm.needs has for it."""
    if isinstance(batch, FlowBatch):
        return replace(batch, velocities_NLC={**batch.velocities_NLC, name: velocities_RLC})
    shape = (*batch.trained_steps_NK.shape, *velocities_RLC.shape[1:])
    velocities = {**batch.velocities_NKLC, name: velocities_RLC.view(shape)}
    return replace(batch, velocities_NKLC=velocities)
