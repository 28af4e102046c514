"""What a loss sees of a batch."""

from __future__ import annotations

from dataclasses import replace

import torch

from megadiff.engines.microbatch import loss_inputs, microbatches
from megadiff.models.qwen_image.adapter import QwenImageAdapter
from tests.distributed.engines import train_batch


def test_log_probs_keep_their_precision(tiny_model):
    """float32 around 1 is half a percent of a clip range of 1e-5 apart; the rest is computed in
    float32.
    """
    batch = train_batch(QwenImageAdapter(tiny_model))
    log_probs_NW = -1 - 1e-9 * torch.rand(batch.num_samples, 2, dtype=torch.float64)
    batch = replace(batch, old_log_probs_NW=log_probs_NW, rollout_log_probs_NW=log_probs_NW - 1e-9)
    cpu = torch.device("cpu")
    pieces = list(microbatches(batch, torch.arange(2 * batch.num_samples), 5, cpu))
    inputs = [loss_inputs(batch, piece, piece.latents_BLC) for piece in pieces]
    old, rollout = (
        torch.cat([getattr(one, f"{name}_log_prob_B") for one in inputs]).view(-1, 2)
        for name in ("old", "rollout")
    )
    assert torch.equal(old, log_probs_NW) and torch.equal(rollout, log_probs_NW - 1e-9)
    assert (
        {one.advantage_B.dtype for one in inputs}
        == {piece.latents_BLC.dtype for piece in pieces}
        == {torch.float32}
    )
