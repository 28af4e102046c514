"""Cutting a TrainBatch into the pieces that one forward takes, the same for every engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megadiff.models.adapter import Conditioning
from megadiff.types import StepInputs, TrainBatch


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """B (sample, window step) pairs of a batch.

    sample_B, step_B: int64, which pair each row is. conditioning: name → [B, …], left where the batch has it; masks
    stay on the CPU this way. The rest, in float32 on the device, is as in StepInputs.
    """

    sample_B: Tensor
    step_B: Tensor
    latents_BLC: Tensor
    prev_sample_BLC: Tensor
    sigma_B: Tensor
    sigma_next_B: Tensor
    conditioning: Conditioning


def num_microbatches(batch: TrainBatch, size: int) -> int:
    return -(-batch.num_samples * batch.num_window_steps // size)


def microbatches(batch: TrainBatch, size: int, device: torch.device) -> Iterator[Microbatch]:
    """All pairs of the batch, at most `size` in a piece; the last may be smaller.

    A sample's steps follow each other: rows of one prompt stay together, so its text is seldom padded for another's.
    """
    num_pairs, num_steps = batch.num_samples * batch.num_window_steps, batch.num_window_steps
    for start in range(0, num_pairs, size):
        pair_B = torch.arange(start, min(start + size, num_pairs))
        sample_B, step_B = pair_B // num_steps, pair_B % num_steps
        index_B = batch.window_start_N.cpu()[sample_B] + step_B
        group_B = batch.group_index_N.cpu()[sample_B]
        yield Microbatch(
            sample_B=sample_B,
            step_B=step_B,
            latents_BLC=_on(device, batch.latents_NSLC[sample_B, step_B]),
            prev_sample_BLC=_on(device, batch.latents_NSLC[sample_B, step_B + 1]),
            sigma_B=_on(device, batch.schedule[index_B]),
            sigma_next_B=_on(device, batch.schedule[index_B + 1]),
            conditioning={name: value_P[group_B] for name, value_P in batch.conditioning.items()},
        )


def step_inputs(batch: TrainBatch, microbatch: Microbatch, velocity_BLC: Tensor) -> StepInputs:
    """The record that a loss sees."""
    device = velocity_BLC.device
    sample_B, step_B = microbatch.sample_B, microbatch.step_B
    ref_means = batch.ref_means_NWLC
    return StepInputs(
        latents_BLC=microbatch.latents_BLC,
        prev_sample_BLC=microbatch.prev_sample_BLC,
        velocity_BLC=velocity_BLC,
        sigma_B=microbatch.sigma_B,
        sigma_next_B=microbatch.sigma_next_B,
        old_log_prob_B=batch.old_log_probs_NW[sample_B, step_B].to(device),
        advantage_B=_on(device, batch.advantages_N[sample_B]),
        weight_B=_on(device, batch.weights_N[sample_B]),
        schedule=_on(device, batch.schedule),
        sampling=batch.sampling,
        ref_mean_BLC=None if ref_means is None else _on(device, ref_means[sample_B, step_B]),
    )


def _on(device: torch.device, value: Tensor) -> Tensor:
    return value.to(device, torch.float32, non_blocking=True)
