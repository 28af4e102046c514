"""Cutting a batch into the pieces that one forward takes, the same for every engine.

A piece is of one component: rows of two experts never share a forward. Ranks may have different numbers of an expert's
rows, as every prompt group has a window of its own, but all of them must make the same collectives. So a rank that has
fewer pieces than another makes up for them with fillers, whose results are thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


@dataclass(frozen=True, kw_only=True)
class Share:
    """What a component has of a batch. rows_R: int64, its rows on this rank, rising. num_microbatches: what every rank
    makes of them, as many as the rank that has most; 0: no rank has any. num_pairs: weighted rows over all dp ranks."""

    rows_R: Tensor
    num_microbatches: int
    num_pairs: float


def num_microbatches(num_rows: int, size: int) -> int:
    return -(-num_rows // size)


def pieces(
    batch: Batch, share: Share, size: int, device: torch.device
) -> Iterator[tuple[Microbatch | FlowMicrobatch, bool]]:
    """share.num_microbatches pieces, each with whether it counts: a filler is one row of this rank, of whichever
    component."""
    for piece in microbatches(batch, share.rows_R, size, device):
        yield piece, True
    for _ in range(share.num_microbatches - num_microbatches(len(share.rows_R), size)):
        (filler,) = microbatches(batch, torch.zeros(1, dtype=torch.int64), 1, device)
        yield filler, False


def component_rows(batch: Batch, component_of: Callable[[float], str]) -> dict[str, Tensor]:
    """component → its rows [R] int64, rising; without the components that have none. On the CPU."""
    rows: dict[str, list[int]] = {}
    for row, component in enumerate(_components(batch, component_of)):
        rows.setdefault(component, []).append(row)
    return {component: torch.tensor(each) for component, each in rows.items()}


@singledispatch
def _components(batch: Batch, component_of: Callable[[float], str]) -> list[str]:
    """Of each row, by the sigma at which its velocity is taken."""
    raise TypeError(f"a {type(batch).__name__} is no batch")


@_components.register
def _(batch: TrainBatch, component_of: Callable[[float], str]) -> list[str]:
    by_step = [component_of(sigma) for sigma in batch.schedule[:-1].tolist()]
    index_NW = batch.window_start_N.cpu()[:, None] + torch.arange(batch.num_window_steps)
    return [by_step[index] for index in index_NW.flatten().tolist()]


@_components.register
def _(batch: FlowBatch, component_of: Callable[[float], str]) -> list[str]:
    return [component_of(sigma) for sigma in batch.sigma_N.tolist()]


@singledispatch
def row_weights(batch: Batch) -> Tensor:
    """[rows] of a batch."""
    raise TypeError(f"a {type(batch).__name__} is no batch")


@row_weights.register
def _(batch: TrainBatch) -> Tensor:
    return batch.weights_N.repeat_interleave(batch.num_window_steps)


@row_weights.register
def _(batch: FlowBatch) -> Tensor:
    return batch.weights_N


@singledispatch
def microbatches(
    batch: Batch, rows_R: Tensor, size: int, device: torch.device
) -> Iterator[Microbatch] | Iterator[FlowMicrobatch]:
    """These rows of the batch, at most `size` in a piece; the last may be smaller."""
    raise TypeError(f"a {type(batch).__name__} is no batch")


@microbatches.register
def _(batch: TrainBatch, rows_R: Tensor, size: int, device: torch.device) -> Iterator[Microbatch]:
    """Rows are (sample, window step) pairs.

    A sample's steps follow each other: rows of one prompt stay together, so its text is seldom padded for another's.
    """
    num_steps = batch.num_window_steps
    for row_B in _chunks(rows_R, size):
        sample_B, step_B = row_B // num_steps, row_B % num_steps
        index_B = batch.window_start_N.cpu()[sample_B] + step_B
        group_B = batch.group_index_N.cpu()[sample_B]
        yield Microbatch(
            sample_B=sample_B,
            step_B=step_B,
            latents_BLC=_on(device, batch.latents_NSLC[sample_B, step_B]),
            prev_sample_BLC=_on(device, batch.latents_NSLC[sample_B, step_B + 1]),
            sigma_B=_on(device, batch.schedule[index_B]),
            sigma_next_B=_on(device, batch.schedule[index_B + 1]),
            conditioning=_conditioning(batch, group_B, device),
        )


@microbatches.register
def _(
    batch: FlowBatch, rows_R: Tensor, size: int, device: torch.device
) -> Iterator[FlowMicrobatch]:
    """Noised on the device: one pass over each tensor there; on the CPU none where rows follow each other, but for a GPU's
    copy."""
    for row_B in _chunks(rows_R, size):
        first, last = int(row_B[0]), int(row_B[-1])
        rows = slice(first, last + 1) if last - first == len(row_B) - 1 else row_B
        latents_BLC, noise_BLC = (
            _on(device, batch.latents_NLC[rows]),
            _on(device, batch.noise_NLC[rows]),
        )
        sigma_B = _on(device, batch.sigma_N[rows])
        yield FlowMicrobatch(
            latents_BLC=torch.lerp(latents_BLC, noise_BLC, sigma_B[:, None, None]),
            target_BLC=noise_BLC - latents_BLC,
            sigma_B=sigma_B,
            weight_B=_on(device, batch.weights_N[rows]),
            conditioning=_conditioning(batch, batch.group_index_N[rows], device),
        )


def _chunks(rows_R: Tensor, size: int) -> tuple[Tensor, ...]:
    """torch splits nothing into one empty piece."""
    return rows_R.split(size) if len(rows_R) else ()


@singledispatch
def loss_inputs(
    batch: Batch, piece: Microbatch | FlowMicrobatch, velocity_BLC: Tensor
) -> StepInputs | FlowInputs:
    """The record that a loss sees."""
    raise TypeError(f"a {type(batch).__name__} is no batch")


@loss_inputs.register
def _(batch: FlowBatch, piece: FlowMicrobatch, velocity_BLC: Tensor) -> FlowInputs:
    return FlowInputs(
        velocity_BLC=velocity_BLC,
        target_BLC=piece.target_BLC,
        sigma_B=piece.sigma_B,
        weight_B=piece.weight_B,
    )


@loss_inputs.register
def _(batch: TrainBatch, microbatch: Microbatch, velocity_BLC: Tensor) -> StepInputs:
    device, sample_B = velocity_BLC.device, microbatch.sample_B
    old, rollout, ref_mean = (
        None if value_NW is None else _moved(device, value_NW[sample_B, microbatch.step_B])
        for value_NW in (batch.old_log_probs_NW, batch.rollout_log_probs_NW, batch.ref_means_NWLC)
    )
    return StepInputs(
        latents_BLC=microbatch.latents_BLC,
        prev_sample_BLC=microbatch.prev_sample_BLC,
        velocity_BLC=velocity_BLC,
        sigma_B=microbatch.sigma_B,
        sigma_next_B=microbatch.sigma_next_B,
        old_log_prob_B=old,
        advantage_B=_on(device, batch.advantages_N[sample_B]),
        weight_B=_on(device, batch.weights_N[sample_B]),
        schedule=_on(device, batch.schedule),
        sampling=batch.sampling,
        ref_mean_BLC=ref_mean,
        rollout_log_prob_B=rollout,
    )


def _conditioning(batch: Batch, group_B: Tensor, device: torch.device) -> Conditioning:
    return {name: _locked(device, value_P[group_B]) for name, value_P in batch.conditioning.items()}


def _on(device: torch.device, value: Tensor) -> Tensor:
    """In float32, converted there."""
    return _moved(device, value).to(torch.float32)


def _moved(device: torch.device, value: Tensor) -> Tensor:
    return _locked(device, value).to(device, non_blocking=True)


def _locked(device: torch.device, value: Tensor) -> Tensor:
    """Page-locked where it will be copied to a GPU: from other memory the host waits for all that the GPU has to do before."""
    return value.pin_memory() if device.type == "cuda" and value.device.type == "cpu" else value
