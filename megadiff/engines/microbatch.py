"""Cut a batch into microbatches, the rows of one forward, the same for every engine.

Rows of two components never share a forward, nor do rows whose given images differ in size. Ranks
may have different numbers of a component's rows, because every prompt group has a window of its
own, and of sizes. But all of them must make the same collectives, which no size changes. So a rank
with fewer microbatches than another adds fillers, whose results are thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megadiff.models.conditioning import Conditioning
from megadiff.types import FlowBatch, MatchInputs, Sampling, StepInputs, TrainBatch

Batch = TrainBatch | FlowBatch


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """Hold B (sample, window step) pairs of a batch.

    row_B: int64, which rows of the batch they are. sample_B, column_B: of each its sample and which
    of the sample's trained steps; step_B: that step of the window. conditioning: name → [B, …],
    left where the batch has it, so masks stay on the CPU. sampling: the batch's, with the sizes of
    these rows' given images. The rest, float32 on the device, is as in StepInputs.
    """

    row_B: Tensor
    sample_B: Tensor
    column_B: Tensor
    step_B: Tensor
    latents_BLC: Tensor
    prev_sample_BLC: Tensor
    sigma_B: Tensor
    sigma_next_B: Tensor
    conditioning: Conditioning
    sampling: Sampling


@dataclass(frozen=True, kw_only=True)
class FlowMicrobatch:
    """Hold B rows of a FlowBatch, noised to sigma_B.

    latents_BLC = (1 − sigma)·clean + sigma·noise, target_BLC = noise − clean. The rest is as in
    Microbatch.
    """

    row_B: Tensor
    latents_BLC: Tensor
    target_BLC: Tensor
    sigma_B: Tensor
    conditioning: Conditioning
    sampling: Sampling


@dataclass(frozen=True, kw_only=True)
class ComponentRows:
    """Hold the rows of a batch that belong to one component.

    rows_R: int64, its rows on this rank, rising. num_microbatches: what every rank makes of them,
    as many as the rank with most; 0 if no rank has any. num_pairs: weighted rows over all dp ranks.
    """

    rows_R: Tensor
    num_microbatches: int
    num_pairs: float


def cut_rows(batch: Batch, rows_R: Tensor, size: int) -> list[Tensor]:
    """Return each microbatch's rows: `size`, or the rest, of equal sizes of given images."""
    if not len(rows_R):  # torch splits an empty tensor into one empty chunk
        return []
    if len(set(batch.images_P)) < 2:
        return list(rows_R.split(size))

    by_sizes: dict[object, list[int]] = {}
    for row, group in zip(rows_R.tolist(), _groups(batch, rows_R).tolist(), strict=True):
        by_sizes.setdefault(batch.images_P[group], []).append(row)
    cut = []
    for alike in by_sizes.values():
        cut += torch.tensor(alike).split(size)
    return cut


def _groups(batch: Batch, row_B: Tensor) -> Tensor:
    """Return the group of each row, on the CPU."""
    num_columns = 1 if isinstance(batch, FlowBatch) else batch.trained_steps_NK.shape[1]
    return batch.group_index_N.cpu()[row_B // num_columns]


def padded_microbatches(
    batch: Batch, rows: ComponentRows, size: int, device: torch.device
) -> Iterator[tuple[Microbatch | FlowMicrobatch, bool]]:
    """Yield rows.num_microbatches microbatches, each with whether it counts.

    A filler is the first row of this rank, of whichever component, twice: a loss may want pairs.
    """
    for microbatch in microbatches(batch, rows.rows_R, size, device):
        yield microbatch, True
    # as few rows as can be: collectives do not depend on their number
    first_row = torch.zeros(min(size, 2), dtype=torch.int64)
    for _ in range(rows.num_microbatches - len(cut_rows(batch, rows.rows_R, size))):
        (filler,) = microbatches(batch, first_row, size, device)
        yield filler, False


def component_rows(batch: Batch, component_of: Callable[[float], str]) -> dict[str, Tensor]:
    """Return component → its rows [R] int64, rising, on the CPU.

    A row belongs by the sigma at which its velocity is taken. Components without rows are left out.
    """
    if isinstance(batch, FlowBatch):
        sigma_R = batch.sigma_N
    else:
        index_NK = batch.window_start_N.cpu()[:, None] + batch.trained_steps_NK
        sigma_R = batch.schedule[index_NK.flatten()]
    rows: dict[str, list[int]] = {}
    for row, sigma in enumerate(sigma_R.tolist()):
        rows.setdefault(component_of(sigma), []).append(row)
    return {component: torch.tensor(rows_R) for component, rows_R in rows.items()}


def microbatches(
    batch: Batch, rows_R: Tensor, size: int, device: torch.device
) -> Iterator[Microbatch | FlowMicrobatch]:
    """Yield these rows of the batch, as cut_rows() cuts them."""
    for row_B in cut_rows(batch, rows_R, size):
        if isinstance(batch, FlowBatch):
            yield _flow_microbatch(batch, row_B, device)
        else:
            yield _step_microbatch(batch, row_B, device)


def _step_microbatch(batch: TrainBatch, row_B: Tensor, device: torch.device) -> Microbatch:
    # a sample's steps follow each other, so a text is seldom padded for another prompt's
    num_columns = batch.trained_steps_NK.shape[1]
    sample_B = row_B // num_columns
    column_B = row_B % num_columns
    step_B = batch.trained_steps_NK[sample_B, column_B]
    index_B = batch.window_start_N.cpu()[sample_B] + step_B

    return Microbatch(
        row_B=row_B,
        sample_B=sample_B,
        column_B=column_B,
        step_B=step_B,
        latents_BLC=_on(device, batch.latents_NSLC[sample_B, step_B]),
        prev_sample_BLC=_on(device, batch.latents_NSLC[sample_B, step_B + 1]),
        sigma_B=_on(device, batch.schedule[index_B]),
        sigma_next_B=_on(device, batch.schedule[index_B + 1]),
        **_given(batch, row_B, device),
    )


def _flow_microbatch(batch: FlowBatch, row_B: Tensor, device: torch.device) -> FlowMicrobatch:
    first = int(row_B[0])
    last = int(row_B[-1])
    # a slice is a view; an index would copy the rows on the CPU
    rows = slice(first, last + 1) if last - first == len(row_B) - 1 else row_B

    latents_BLC = _on(device, batch.latents_NLC[rows])
    noise_BLC = _on(device, batch.noise_NLC[rows])
    sigma_B = _on(device, batch.sigma_N[rows])

    return FlowMicrobatch(
        row_B=row_B,
        latents_BLC=torch.lerp(latents_BLC, noise_BLC, sigma_B[:, None, None]),
        target_BLC=noise_BLC - latents_BLC,
        sigma_B=sigma_B,
        **_given(batch, row_B, device),
    )


def loss_inputs(
    batch: Batch, microbatch: Microbatch | FlowMicrobatch, velocity_BLC: Tensor
) -> StepInputs | MatchInputs:
    """Return the record that a loss sees."""
    device = velocity_BLC.device
    if isinstance(microbatch, FlowMicrobatch):
        assert isinstance(batch, FlowBatch), "its microbatches are FlowMicrobatches"
        row_B = microbatch.row_B
        return MatchInputs(
            velocity_BLC=velocity_BLC,
            target_BLC=microbatch.target_BLC,
            sigma_B=microbatch.sigma_B,
            advantage_B=_on(device, batch.advantages_N[row_B]),
            weight_B=_on(device, batch.weights_N[row_B]),
            velocities={
                name: _moved(device, value_NLC[row_B])
                for name, value_NLC in batch.velocities_NLC.items()
            },
        )
    assert isinstance(batch, TrainBatch), "its microbatches are no FlowMicrobatch"

    sample_B = microbatch.sample_B
    step_B = microbatch.step_B

    def rows_of(value_NW: Tensor | None) -> Tensor | None:
        return None if value_NW is None else _moved(device, value_NW[sample_B, step_B])

    return StepInputs(
        latents_BLC=microbatch.latents_BLC,
        prev_sample_BLC=microbatch.prev_sample_BLC,
        velocity_BLC=velocity_BLC,
        sigma_B=microbatch.sigma_B,
        sigma_next_B=microbatch.sigma_next_B,
        old_log_prob_B=rows_of(batch.old_log_probs_NW),
        advantage_B=_on(device, batch.advantages_N[sample_B]),
        weight_B=_on(device, batch.weights_N[sample_B]),
        schedule=_on(device, batch.schedule),
        sampling=batch.sampling,
        velocities={
            name: _moved(device, value_NKLC[sample_B, microbatch.column_B])
            for name, value_NKLC in batch.velocities_NKLC.items()
        },
        rollout_log_prob_B=rows_of(batch.rollout_log_probs_NW),
    )


def _given(batch: Batch, row_B: Tensor, device: torch.device) -> dict[str, Any]:
    """Return the rows' conditioning and sampling, by a microbatch's names."""
    group_B = _groups(batch, row_B)
    conditioning = {}
    for name, value_P in batch.conditioning.items():
        if isinstance(value_P, Tensor):
            rows = value_P[group_B]
        else:  # of unequal lengths, but these rows' are equal
            rows = torch.stack([value_P[group] for group in group_B.tolist()])
        conditioning[name] = _locked(device, rows)
    sampling = batch.sampling
    if batch.images_P:
        sampling = replace(sampling, images=batch.images_P[int(group_B[0])])
    return {"conditioning": conditioning, "sampling": sampling}


def _on(device: torch.device, value: Tensor) -> Tensor:
    # converted there: bfloat16 moves half the bytes
    return _moved(device, value).to(torch.float32)


def _moved(device: torch.device, value: Tensor) -> Tensor:
    return _locked(device, value).to(device, non_blocking=True)


def _locked(device: torch.device, value: Tensor) -> Tensor:
    # from other memory than page-locked the host would wait for all the GPU's work before the copy
    return value.pin_memory() if device.type == "cuda" and value.device.type == "cpu" else value
