"""A batch holds each group's rows in order, and its updates have equally many of every group.

Rows of drawn noise have an identity: a group's draws are the same on any rank, beside any others.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megadiff.algorithms import build_algorithm
from megadiff.config.schema import Config
from megadiff.train.rows import (
    ROWS,
    rows_per_group,
    to_train_batch,
    train_sampling,
    update_parts,
    with_velocities,
)
from megadiff.train.selection import ScoredGroups, best_and_worst
from megadiff.types import FlowBatch, TrainBatch
from tests.scored import GROUP_SIZE, STEPS, TOKENS, make_group, scored_groups


def test_rows_follow_the_groups() -> None:
    groups = [make_group(index) for index in range(3)]
    weights_PG = torch.tensor([1.0, 0.0, 1.0])[:, None].expand(3, GROUP_SIZE)
    batch = to_train_batch(groups, torch.ones(3, GROUP_SIZE), weights_PG)
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
    batch = to_train_batch(groups, torch.arange(12.0).view(3, 4), torch.ones(3, 4))
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
        to_train_batch([make_group(0), other], torch.ones(2, 4), torch.ones(2, 4))


def config_of(name: str, *, noise_levels: int = 3, trained_steps: int = 0) -> Config:
    config = Config()
    config.algorithm.name = name
    config.algorithm.group_size = GROUP_SIZE
    config.algorithm.noise_levels = noise_levels
    config.algorithm.trained_steps = trained_steps
    return config


def rows_of(config: Config, scored: ScoredGroups) -> TrainBatch | FlowBatch:
    algorithm = build_algorithm(config.algorithm)
    return ROWS[algorithm.rows](scored, config, algorithm)


def levels(name: str, indices: list[int], **changes) -> FlowBatch:
    batch = rows_of(config_of(name), scored_groups(indices, **changes))
    assert isinstance(batch, FlowBatch)
    return batch


def by_group(batch: FlowBatch, value_N: Tensor) -> Tensor:
    return value_N.unflatten(0, (int(batch.group_index_N.max()) + 1, -1))


@pytest.mark.parametrize("name", ["nft", "dpo"])
def test_draws_are_a_samples_own(name: str) -> None:
    """They depend on seed, step, prompt and sample, not on the rank or the order of groups."""
    batch = levels(name, [0, 1, 2])
    other = levels(name, [2, 0])
    for column in ("latents_NLC", "noise_NLC", "sigma_N", "advantages_N"):
        first = by_group(batch, getattr(batch, column))
        assert torch.equal(by_group(other, getattr(other, column)), first[[2, 0]]), column
        again = levels(name, [0, 1, 2], seed=3)
        differs = not torch.equal(getattr(again, column), getattr(batch, column))
        assert differs == (column in ("noise_NLC", "sigma_N")), column
    assert not torch.equal(levels(name, [0], step=3).noise_NLC, levels(name, [0]).noise_NLC)


def test_a_groups_other_half_has_samples_and_draws_of_its_own() -> None:
    """Two groups of one prompt differ in their sample indices."""
    group = make_group(0, num_steps=0)
    later = replace(group, sample_indices=tuple(range(GROUP_SIZE, 2 * GROUP_SIZE)))
    scored = replace(scored_groups([0, 0]), groups=[group, later])
    batch = rows_of(config_of("nft"), scored)
    assert len(batch.noise_NLC.flatten(1).unique(dim=0)) == 2 * GROUP_SIZE * 3


def test_levels_of_a_sample() -> None:
    batch = levels("nft", [0, 1], weights_P=torch.tensor([1.0, 0.0]))
    schedule = make_group(0).schedule
    sigma_PGK = batch.sigma_N.view(2, GROUP_SIZE, 3)
    assert all(len(sigma_K.unique()) == 3 for sigma_K in sigma_PGK.flatten(0, 1))
    assert set(batch.sigma_N.tolist()) <= set(schedule[:-1].tolist())
    assert len(sigma_PGK.flatten(0, 1).unique(dim=0)) > 1  # each sample draws its own
    assert batch.latents_NLC.shape == (2 * GROUP_SIZE * 3, TOKENS, 1)
    clean_N = torch.tensor([0.0, 1, 2, 3, 100, 101, 102, 103]).repeat_interleave(3)
    assert torch.equal(batch.latents_NLC[:, 0, 0], clean_N)
    advantages_PG = scored_groups([0, 1]).advantages_PG
    assert torch.equal(batch.advantages_N, advantages_PG.flatten().repeat_interleave(3))
    assert batch.weights_N.tolist() == [1.0] * 12 + [0.0] * 12
    assert batch.denominator == 12
    assert abs(float(batch.noise_NLC.mean())) < 0.5 and 0.7 < float(batch.noise_NLC.std()) < 1.3


def test_forwards_of_clean_samples_have_no_guidance() -> None:
    batch = levels("nft", [0, 1])
    assert batch.conditioning.keys() == {"prompt_embeds"}
    assert batch.sampling.true_cfg_scale == 1
    config = config_of("nft")
    config.rollout.true_cfg_scale = 4.0
    sampled = {
        name: train_sampling(config, build_algorithm(config_of(name).algorithm)).true_cfg_scale
        for name in ("nft", "dpo", "flow_grpo", "sft")
    }
    assert sampled == {"nft": 1, "dpo": 1, "flow_grpo": 4, "sft": 1}


def test_awm_never_draws_pure_noise() -> None:
    drawn = {
        name: float(rows_of(config_of(name, noise_levels=5), scored_groups([0, 1])).sigma_N.max())
        for name in ("nft", "awm")
    }
    assert drawn["nft"] == 1 and drawn["awm"] == pytest.approx(5 / 6)


def test_a_pair_is_best_and_worst_of_the_same_noise() -> None:
    advantages_PG = torch.tensor([[0.5, 2.0, -1.0, -1.5], [0.0, 0.0, 0.0, 0.0]])
    weights_P = torch.tensor([1.0, 0.0])
    batch = levels("dpo", [0, 1], advantages_PG=advantages_PG, weights_P=weights_P)
    assert batch.num_rows == 2 * 2 * 3
    assert torch.equal(batch.noise_NLC[0::2], batch.noise_NLC[1::2])
    assert torch.equal(batch.sigma_N[0::2], batch.sigma_N[1::2])
    assert all(len(sigma.unique()) == 3 for sigma in batch.sigma_N[0::2].view(2, 3))
    assert len(batch.noise_NLC.flatten(1).unique(dim=0)) == 6
    assert batch.latents_NLC[:6, 0, 0].tolist() == [1.0, 3.0] * 3
    assert batch.advantages_N[:6].tolist() == [2.0, -1.5] * 3
    assert batch.weights_N.tolist() == [1.0] * 6 + [0.0] * 6  # equal rewards make no pair


@pytest.mark.parametrize(
    "name, trained_samples, trained_steps",
    [
        ("flow_grpo", 0, 0),
        ("flow_grpo", 3, 1),
        ("nft", 0, 0),
        ("awm", 3, 0),
        ("rwr", 2, 0),
        ("dpo", 0, 0),
    ],
)
def test_rows_are_as_many_as_was_said(name: str, trained_samples: int, trained_steps: int) -> None:
    config = config_of(name, trained_steps=trained_steps)
    config.algorithm.trained_samples = trained_samples
    algorithm = build_algorithm(config.algorithm)
    config.rollout.sde_window_size = STEPS if algorithm.rows == "steps" else 0
    scored = scored_groups([0, 1], num_steps=config.rollout.sde_window_size)
    if trained_samples:
        scored = best_and_worst(scored, trained_samples)
    assert rows_of(config, scored).num_rows == 2 * rows_per_group(config, algorithm)


def test_each_sample_trains_steps_of_its_own() -> None:
    batch = rows_of(config_of("flow_grpo", trained_steps=1), scored_groups([0, 1], num_steps=STEPS))
    assert isinstance(batch, TrainBatch)
    assert batch.trained_steps_NK.shape == (2 * GROUP_SIZE, 1)
    assert set(batch.trained_steps_NK.flatten().tolist()) == {0, 1}
    assert batch.denominator == batch.num_rows == 8
    swapped = rows_of(
        config_of("flow_grpo", trained_steps=1), scored_groups([1, 0], num_steps=STEPS)
    )
    assert torch.equal(swapped.trained_steps_NK, batch.trained_steps_NK.roll(GROUP_SIZE, 0))
    two = rows_of(config_of("flow_grpo", trained_steps=2), scored_groups([0, 1], num_steps=STEPS))
    assert two.trained_steps_NK.sort(dim=1).values.tolist() == [[0, 1]] * 8


@pytest.mark.parametrize("name", ["nft", "dpo"])
def test_an_update_has_whole_pairs_in_every_column(name: str) -> None:
    config = config_of(name, noise_levels=4)
    batch = rows_of(config, scored_groups([0, 1]))
    row_N = torch.arange(batch.num_rows)
    batch = with_velocities(batch, "reference", row_N[:, None, None].float())
    parts = update_parts(batch, num_updates=2)
    half = batch.num_rows // 4  # of a group's rows
    for part, first in zip(parts, (0, half), strict=True):
        rows = torch.cat([row_N[first : first + half], row_N[first + 2 * half : first + 3 * half]])
        for column in vars(batch):
            if column.rpartition("_")[2] in ("NLC", "N") and column != "velocities_NLC":
                assert torch.equal(getattr(part, column), getattr(batch, column)[rows]), column
        assert torch.equal(part.velocities_NLC["reference"].flatten(), rows.float())
        assert part.conditioning is batch.conditioning
    if name == "dpo":
        assert all(torch.equal(part.sigma_N[0::2], part.sigma_N[1::2]) for part in parts)


def test_a_window_is_not_taken_for_clean_samples() -> None:
    with pytest.raises(AssertionError, match="3 states: a window's, and not the clean latents"):
        rows_of(config_of("nft"), scored_groups([0], num_steps=STEPS))
