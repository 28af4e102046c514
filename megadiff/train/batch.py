"""From scored groups to what an engine trains on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megadiff.types import RolloutGroup, TrainBatch


def to_train_batch(
    groups: Sequence[RolloutGroup], advantages_PG: Tensor, weights_P: Tensor
) -> TrainBatch:
    """Join groups to one batch, group by group.

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
    weights_N = weights_P.repeat_interleave(group_size)

    return TrainBatch(
        latents_NSLC=torch.cat([group.latents_GSLC for group in groups]),
        old_log_probs_NW=torch.cat([group.log_probs_GW for group in groups]),
        window_start_N=starts_P.repeat_interleave(group_size),
        advantages_N=advantages_PG.reshape(-1),
        weights_N=weights_N,
        group_index_N=torch.arange(len(groups)).repeat_interleave(group_size),
        conditioning=stack_conditioning([group.conditioning for group in groups]),
        schedule=first.schedule,
        sampling=first.sampling,
        denominator=max(float(weights_N.sum()), 1.0) * num_steps,
    )


def stack_conditioning(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Join [1, tokens, …] tensors of several groups to one [P, max tokens, …] tensor a name.

    Shorter ones are padded with zeros (False in masks).
    """
    stacked = {}
    for name in rows[0]:
        tensors = [row[name].squeeze(0) for row in rows]
        stacked[name] = pad_sequence(tensors, batch_first=True)
    return stacked


def update_parts(batch: TrainBatch, *, group_size: int, num_updates: int) -> list[TrainBatch]:
    """Return the batches of num_updates updates, each with equally many samples of every group.

    The split is by sample index, so that an update has the same samples under every layout.
    group_size must be divisible by num_updates. Conditioning and denominator stay.
    """
    # told by their letters, so that a column that is added later is split as well
    columns = {
        name: value
        for name, value in vars(batch).items()
        if isinstance(value, Tensor) and name.rpartition("_")[2].startswith("N")
    }
    # [groups, updates, samples of a group in an update]
    index_PUG = torch.arange(batch.num_samples).view(-1, num_updates, group_size // num_updates)

    parts = []
    for index_PG in index_PUG.unbind(1):
        rows: dict[str, Any] = {name: value[index_PG.flatten()] for name, value in columns.items()}
        parts.append(replace(batch, **rows))
    return parts
