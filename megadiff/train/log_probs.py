"""Compute log_probs of stored steps from an engine's velocities."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megadiff.diffusion import sde
from megadiff.engines.engine import Engine
from megadiff.engines.microbatch import Microbatch, microbatches
from megadiff.types import TrainBatch


@dataclass(frozen=True, kw_only=True)
class LogProbs:
    """The log_probs of a batch's steps.

    log_probs_NW: float64. means_NWLC: float32, the means of p(prev_sample | latents).
    """

    log_probs_NW: Tensor
    means_NWLC: Tensor


def log_probs(engine: Engine, batch: TrainBatch) -> LogProbs:
    """Compute log_prob of each window step under the engine's policy. Collective.

    batch: all steps of its windows are rows. The arithmetic runs where an update's runs, in its
    microbatches, so that both round alike.
    """
    velocities_RLC = engine.velocities(batch)
    shape = (batch.num_samples, batch.num_window_steps)
    log_probs_NW = torch.empty(shape, dtype=torch.float64)
    means_NWLC = torch.empty(*shape, *velocities_RLC.shape[1:])

    device = engine.mesh.device
    size = engine.config.train.microbatch_size
    for microbatch in microbatches(batch, torch.arange(batch.num_rows), size, device):
        assert isinstance(microbatch, Microbatch), "of a TrainBatch"
        step = sde.SdeStep(
            batch.sampling, batch.schedule, microbatch.sigma_B, microbatch.sigma_next_B
        )
        velocity_BLC = velocities_RLC[microbatch.row_B].to(device)
        mean_BLC = sde.step_mean(step, microbatch.latents_BLC, velocity_BLC)
        log_prob_B = sde.log_prob(step, microbatch.prev_sample_BLC, mean_BLC)
        log_probs_NW[microbatch.sample_B, microbatch.step_B] = log_prob_B.cpu()
        means_NWLC[microbatch.sample_B, microbatch.step_B] = mean_BLC.cpu()
    return LogProbs(log_probs_NW=log_probs_NW, means_NWLC=means_NWLC)
