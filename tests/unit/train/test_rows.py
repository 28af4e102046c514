"""A batch holds each group's rows in order, and its updates have equally many of every group."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megadiff.train.rows import to_train_batch, update_parts
from megadiff.types import Prompt, RolloutGroup, Sampling

GROUP_SIZE, STEPS, TOKENS = 4, 2, 3


def make_group(index: int) -> RolloutGroup:
    """A group whose values tell group, sample and state."""
    sample_G = 100.0 * index + torch.arange(GROUP_SIZE)
    state_S = torch.arange(STEPS + 1) / 10
    latents_GS = sample_G[:, None] + state_S
    return RolloutGroup(
        prompt=Prompt(text="a cat", id=f"{index:016x}"),
        sampling=Sampling(height=16, width=16, num_inference_steps=6),
        sample_indices=tuple(range(GROUP_SIZE)),
        window_start=index,
        latents_GSLC=latents_GS[..., None, None].expand(-1, -1, TOKENS, 1),
        log_probs_GW=sample_G[:, None].double().expand(-1, STEPS),
        pixels_GFHWC=torch.zeros(GROUP_SIZE, 1, 2, 2, 3, dtype=torch.uint8),
        schedule=torch.linspace(1, 0, 7),
        conditioning={"prompt_embeds": torch.ones(1, 2 + index, 5)},
        policy_version=0,
        replica=f"replica_{index}",
    )


def test_rows_follow_the_groups() -> None:
    groups = [make_group(index) for index in range(3)]
    batch = to_train_batch(groups, torch.ones(3, GROUP_SIZE), torch.tensor([1.0, 0.0, 1.0]))
    assert batch.latents_NSLC.shape == (12, STEPS + 1, TOKENS, 1)
    assert batch.old_log_probs_NW.dtype == torch.float64
    assert batch.old_log_probs_NW[:, 0].tolist() == batch.latents_NSLC[:, 0, 0, 0].tolist()
    assert batch.window_start_N.tolist() == batch.group_index_N.tolist()
    assert batch.group_index_N.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert batch.weights_N.tolist() == [1.0] * 4 + [0.0] * 4 + [1.0] * 4
    assert batch.conditioning["prompt_embeds"].shape == (3, 4, 5)
    assert batch.denominator == 8 * STEPS


def test_an_update_has_its_samples_of_every_group_in_every_column() -> None:
    groups = [make_group(index) for index in range(3)]
    batch = to_train_batch(groups, torch.arange(12.0).view(3, 4), torch.ones(3))
    batch = replace(
        batch,
        velocities_NKLC={"reference": batch.latents_NSLC[:, 1:] + 1000},
        rollout_log_probs_NW=batch.old_log_probs_NW + 1000,
    )
    for part, first in zip(update_parts(batch, num_updates=2), (0, 2), strict=True):
        rows = [first, first + 1, first + 4, first + 5, first + 8, first + 9]
        for name in vars(batch):
            if name.rpartition("_")[2] in ("NSLC", "NW", "NK", "N"):
                assert torch.equal(getattr(part, name), getattr(batch, name)[rows]), name
        velocities_NKLC = batch.velocities_NKLC["reference"][rows]
        assert torch.equal(part.velocities_NKLC["reference"], velocities_NKLC)
        assert part.schedule is batch.schedule
        assert part.conditioning is batch.conditioning


def test_groups_of_unlike_schedules_are_named() -> None:
    other = replace(make_group(1), schedule=torch.linspace(1, 0, 8))
    with pytest.raises(ValueError, match="replica_1 sampled with another schedule than replica_0"):
        to_train_batch([make_group(0), other], torch.ones(2, 4), torch.ones(2))
