"""From scored groups to what an engine trains on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from megadiff.types import RolloutGroup, TrainBatch


def to_train_batch(
    groups: Sequence[RolloutGroup], advantages_PG: Tensor, weights_P: Tensor
) -> TrainBatch:
    """Flattens groups to samples (group by group), on the CPU: the engine moves a microbatch at a time.

    denominator is that of this rank alone; `update.with_denominator` makes it global.
    """
    for group in groups[1:]:
        if not torch.equal(group.schedule, groups[0].schedule):
            raise ValueError(
                f"{group.replica} sampled with another schedule than {groups[0].replica}"
            )
    samples = [trajectory for group in groups for trajectory in group.trajectories]
    group_size = len(groups[0].trajectories)
    weights_N = weights_P.repeat_interleave(group_size)
    conditioning = stack_conditioning([group.conditioning for group in groups])
    old_log_probs_NW = torch.stack([sample.log_probs for sample in samples])
    return TrainBatch(
        latents_NSLC=torch.stack([sample.latents_SLC for sample in samples]),
        old_log_probs_NW=old_log_probs_NW,
        window_start_N=torch.tensor([sample.window_start for sample in samples]),
        advantages_N=advantages_PG.reshape(-1),
        weights_N=weights_N,
        group_index_N=torch.arange(len(groups)).repeat_interleave(group_size),
        conditioning=conditioning,
        schedule=groups[0].schedule,
        sampling=groups[0].sampling,
        denominator=max(float(weights_N.sum()), 1.0) * old_log_probs_NW.shape[1],
    )


def stack_conditioning(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """[1, tokens, …] tensors of several groups as one [P, max tokens, …] each, padded with zeros (False in masks)."""
    return {
        name: torch.cat(
            [_pad_tokens(row[name], max(other[name].shape[1] for other in rows)) for row in rows]
        )
        for name in rows[0]
    }


def _pad_tokens(value: Tensor, tokens: int) -> Tensor:
    return F.pad(value, (*[0] * (2 * (value.ndim - 2)), 0, tokens - value.shape[1]))


def select(batch: TrainBatch, index_N: Tensor) -> TrainBatch:
    """The samples of index_N [n] int64; conditioning and denominator stay."""
    old, rollout, ref_means = (
        None if value_N is None else value_N[index_N]
        for value_N in (batch.old_log_probs_NW, batch.rollout_log_probs_NW, batch.ref_means_NWLC)
    )
    return replace(
        batch,
        latents_NSLC=batch.latents_NSLC[index_N],
        old_log_probs_NW=old,
        window_start_N=batch.window_start_N[index_N],
        advantages_N=batch.advantages_N[index_N],
        weights_N=batch.weights_N[index_N],
        group_index_N=batch.group_index_N[index_N],
        ref_means_NWLC=ref_means,
        rollout_log_probs_NW=rollout,
    )


def update_parts(batch: TrainBatch, *, group_size: int, num_updates: int) -> list[TrainBatch]:
    """The samples in num_updates equal parts, each with an equal share of every group.

    By sample index, so that a part holds the same samples under every layout. group_size % num_updates == 0.
    """
    sample_N = torch.arange(batch.num_samples) % group_size
    share = group_size // num_updates
    return [
        select(batch, torch.nonzero(sample_N // share == part)[:, 0]) for part in range(num_updates)
    ]
