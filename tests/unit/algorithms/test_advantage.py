"""Group-relative advantages."""

import pytest
import torch

from megadiff.algorithms.advantage import group_advantages

REWARDS = torch.tensor([[1.0, 2.0, 3.0, 6.0], [0.0, 0.0, 1.0, 1.0], [5.0, 5.0, 5.0, 5.0]])


def test_per_group_by_hand():
    advantages, weights = group_advantages(REWARDS, kind="group")
    std = (sum((r - 3) ** 2 for r in (1, 2, 3, 6)) / 4) ** 0.5
    assert advantages[0].tolist() == pytest.approx([(r - 3) / (std + 1e-4) for r in (1, 2, 3, 6)])
    assert weights.tolist() == [1.0, 1.0, 0.0]  # no signal
    assert advantages.shape == REWARDS.shape and torch.equal(advantages[2], torch.zeros(4))


def test_global_std_is_that_of_all_ranks():
    """Two ranks with one half each see the std of the whole, through one sum."""
    whole, _ = group_advantages(REWARDS, kind="global")
    moments = []
    group_advantages(
        REWARDS[:1], kind="global", all_reduce=lambda value: moments.append(value) or value
    )
    group_advantages(
        REWARDS[1:], kind="global", all_reduce=lambda value: moments.append(value) or value
    )
    total = moments[0] + moments[1]
    halves = [
        group_advantages(part, kind="global", all_reduce=lambda _: total)[0]
        for part in (REWARDS[:1], REWARDS[1:])
    ]
    torch.testing.assert_close(torch.cat(halves), whole)
    assert whole[0, 3].item() == pytest.approx(
        3 / (REWARDS.double().std(correction=0).item() + 1e-4)
    )


def test_none_is_the_reward_above_its_group_and_needs_no_other_rank():
    def no_call(_: torch.Tensor) -> torch.Tensor:
        raise AssertionError("no std is wanted")

    advantages, weights = group_advantages(REWARDS, kind="none", all_reduce=no_call)
    assert advantages.dtype == torch.float32
    assert advantages.tolist() == [
        [-2.0, -1.0, 0.0, 3.0],
        [-0.5, -0.5, 0.5, 0.5],
        [0.0, 0.0, 0.0, 0.0],
    ]
    assert weights.tolist() == [1.0, 1.0, 0.0]


def test_advantages_do_not_depend_on_reward_offset():
    torch.testing.assert_close(
        group_advantages(REWARDS, kind="global")[0],
        group_advantages(REWARDS + 10, kind="global")[0],
    )
