"""Cutting a batch into the pieces that one forward takes, the same for every engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import singledispatch

import torch
from torch import Tensor

from megadiff.models.adapter import Conditioning
from megadiff.types import FlowBatch, FlowInputs, StepInputs, TrainBatch

Batch = TrainBatch | FlowBatch


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


@dataclass(frozen=True, kw_only=True)
class FlowMicrobatch:
    """B samples of a FlowBatch, noised to sigma_B: latents_BLC = (1 − sigma)·clean + sigma·noise. weight_B, and
    target_BLC = noise − clean, in float32 on the device; the rest as in Microbatch."""

    latents_BLC: Tensor
    target_BLC: Tensor
    sigma_B: Tensor
    weight_B: Tensor
    conditioning: Conditioning


def num_microbatches(batch: Batch, size: int) -> int:
    return -(-batch.num_rows // size)


@singledispatch
def microbatches(batch: Batch, size: int, device: torch.device) -> Iterator[Microbatch] | Iterator[FlowMicrobatch]:
    """All rows of the batch, at most `size` in a piece; the last may be smaller."""
    raise TypeError(f"a {type(batch).__name__} is no batch")


@microbatches.register
def _(batch: TrainBatch, size: int, device: torch.device) -> Iterator[Microbatch]:
    """Rows are (sample, window step) pairs.

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


@microbatches.register
def _(batch: FlowBatch, size: int, device: torch.device) -> Iterator[FlowMicrobatch]:
    """Noised on the device: one pass over each tensor there, none on the CPU."""
    for start in range(0, batch.num_rows, size):
        rows = slice(start, min(start + size, batch.num_rows))
        latents_BLC, noise_BLC = _on(device, batch.latents_NLC[rows]), _on(device, batch.noise_NLC[rows])
        sigma_B = _on(device, batch.sigma_N[rows])
        yield FlowMicrobatch(
            latents_BLC=torch.lerp(latents_BLC, noise_BLC, sigma_B[:, None, None]),
            target_BLC=noise_BLC - latents_BLC,
            sigma_B=sigma_B,
            weight_B=_on(device, batch.weights_N[rows]),
            conditioning={name: value_P[batch.group_index_N[rows]] for name, value_P in batch.conditioning.items()},
        )


@singledispatch
def loss_inputs(batch: Batch, piece: Microbatch | FlowMicrobatch, velocity_BLC: Tensor) -> StepInputs | FlowInputs:
    """The record that a loss sees."""
    raise TypeError(f"a {type(batch).__name__} is no batch")


@loss_inputs.register
def _(batch: FlowBatch, piece: FlowMicrobatch, velocity_BLC: Tensor) -> FlowInputs:
    return FlowInputs(
        velocity_BLC=velocity_BLC, target_BLC=piece.target_BLC, sigma_B=piece.sigma_B, weight_B=piece.weight_B
    )


@loss_inputs.register
def _(batch: TrainBatch, microbatch: Microbatch, velocity_BLC: Tensor) -> StepInputs:
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
