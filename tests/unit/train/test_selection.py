"""An update trains on groups with a signal, and of a group on its best and worst samples."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megadiff.train import selection
from megadiff.train.selection import best_and_worst, groups_to_train
from tests.scored import STEPS, make_group, scored_groups


@pytest.mark.parametrize(
    "count, first, second", [(2, [1, 3], [2, 0]), (3, [1, 3, 0], [2, 0, 1]), (1, [1], [2])]
)
def test_the_best_and_the_worst_come_in_turns(
    count: int, first: list[int], second: list[int]
) -> None:
    advantages_PG = torch.tensor([[0.5, 2.0, -1.0, -1.5], [-2.0, 0.5, 2.0, -0.5]])
    scored = scored_groups([0, 1], num_steps=STEPS, advantages_PG=advantages_PG)
    chosen = best_and_worst(scored, count)
    for index, samples in enumerate((first, second)):
        group = chosen.groups[index]
        before = scored.groups[index]
        assert group.sample_indices == tuple(samples)
        assert torch.equal(group.latents_GSLC, before.latents_GSLC[samples])
        assert torch.equal(group.log_probs_GW, before.log_probs_GW[samples])
        assert len(group.pixels_GFHWC) == count
        assert torch.equal(chosen.advantages_PG[index], advantages_PG[index][samples])
        keys = scored.sample_keys(index)
        assert chosen.sample_keys(index) == [keys[sample] for sample in samples]
    assert torch.equal(chosen.weights_PG, torch.ones_like(chosen.advantages_PG))


def test_samples_without_a_score_come_last() -> None:
    """Their advantage of 0 lies in the middle; two of the four here have a score below it."""
    advantages_PG = torch.tensor([[1.4, 0.0, -0.6, -0.8], [0.0, -1.0, 0.0, 1.0]])
    weights_PG = torch.tensor([[1.0, 0.0, 1.0, 1.0], [0.0, 1.0, 0.0, 1.0]])
    scored = scored_groups([0, 1], advantages_PG=advantages_PG)
    chosen = best_and_worst(replace(scored, weights_PG=weights_PG), 3)
    assert [group.sample_indices for group in chosen.groups] == [(0, 3, 2), (3, 1, 0)]
    assert chosen.weights_PG.tolist() == [[1, 1, 1], [1, 1, 0]]


def test_updates_share_the_samples_without_a_score() -> None:
    """Of 8 samples 3 have none, and neither of two updates may get all three."""
    advantages_PG = torch.tensor([[4.0, 3.0, 2.0, 1.0, -5.0, 0.0, 0.0, 0.0]])
    weights_PG = torch.tensor([[1.0] * 5 + [0.0] * 3])
    scored = replace(
        scored_groups([0], advantages_PG=advantages_PG),
        groups=[make_group(0, group_size=8)],
        weights_PG=weights_PG,
    )
    (group,) = best_and_worst(scored, 8, num_updates=2).groups
    assert group.sample_indices == (0, 4, 1, 5, 3, 2, 6, 7)
    assert best_and_worst(scored, 6, num_updates=3).groups[0].sample_indices == (0, 4, 1, 3, 2, 5)


def test_equal_samples_are_chosen_alike_everywhere() -> None:
    scored = scored_groups([0], advantages_PG=torch.zeros(1, 4))
    assert best_and_worst(scored, 2).groups[0].sample_indices == (0, 3)
    assert best_and_worst(scored, 4).groups[0].sample_indices == (0, 3, 1, 2)


def test_each_update_has_good_and_bad_samples() -> None:
    advantages_PG = torch.tensor([[0.5, -2.0, 2.0, -0.5]])
    chosen = best_and_worst(scored_groups([0], advantages_PG=advantages_PG), 4)
    for part_R in chosen.advantages_PG[0].view(2, 2):
        assert part_R.min() < 0 < part_R.max()


@pytest.mark.parametrize(
    ("weights", "elsewhere", "microbatch", "expected"),
    [
        ([0, 1, 0, 1], 0, 4, [1, 3]),  # a group fills a microbatch
        ([0, 1, 0, 1], 3, 4, [0, 1, 3]),  # as many as on the rank that has most
        ([0, 0, 0, 1], 0, 8, [0, 3]),  # two fill one
        ([0, 1, 1, 1], 0, 8, [0, 1, 2, 3]),
        ([0, 0, 1, 0], 0, 6, [0, 1, 2]),  # three groups fill two microbatches
        ([1, 0, 0, 1], 0, 64, [0, 1, 2, 3]),  # all of them do not fill one
        ([0, 0, 0, 0], 0, 4, [0]),  # an update whose gradient is zero is one still
        ([1, 1, 1, 1], 0, 4, [0, 1, 2, 3]),
    ],
)
def test_microbatches_stay_full_and_equally_many(
    weights, elsewhere, microbatch, expected, monkeypatch
):
    monkeypatch.setattr(
        selection,
        "all_reduce_max",
        lambda values, _: {key: max(value, elsewhere) for key, value in values.items()},
    )
    config = SimpleNamespace(train=SimpleNamespace(updates_per_step=2, microbatch_size=microbatch))
    mesh = SimpleNamespace(cpu_group=None)
    weights_PG = torch.tensor(weights).float()[:, None]
    assert groups_to_train(weights_PG, rows=8, config=config, mesh=mesh) == expected
