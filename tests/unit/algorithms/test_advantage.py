"""Group-relative advantages."""

import numpy as np
import pytest
import torch

from megadiff.algorithms.advantage import gdpo_advantages, group_advantages

REWARDS = torch.tensor([[1.0, 2.0, 3.0, 6.0], [0.0, 0.0, 1.0, 1.0], [5.0, 5.0, 5.0, 5.0]])


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


def test_rewards_that_differ_by_rounding_carry_no_signal():
    rewards = torch.tensor([[100.00001, 100.0, 100.0], [100.001, 100.0, 100.0], [1e-5, 0.0, 0.0]])
    _, weights = group_advantages(rewards, kind="group")
    assert weights.tolist() == [[0.0] * 3, [1.0] * 3, [1.0] * 3]


def test_a_batch_without_a_score_has_no_advantages():
    for kind in ("group", "global", "none"):
        advantages, weights = group_advantages(torch.full((2, 3), torch.nan), kind=kind)
        assert not advantages.any() and not weights.any()


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
    assert weights.tolist() == [[1.0] * 4, [1.0] * 4, [0.0] * 4]


def _unlike_rewards() -> dict[str, torch.Tensor]:
    """A reward that hardly spreads within a group beside one that spreads by 25 times as much."""
    generator = np.random.default_rng(0)
    return {
        "pick": torch.tensor(0.85 + 0.02 * generator.standard_normal((8, 16))),
        "ocr": torch.tensor(generator.choice([0, 0.5, 1.0], (8, 16))),
    }


def test_gdpo_is_the_whitened_sum_of_normalised_rewards():
    """Against its definition in numpy, with weights of either sign."""
    rewards, factors = _unlike_rewards(), {"pick": 2.0, "ocr": -0.5}
    combined = 0.0
    for name, factor in factors.items():
        values = rewards[name].numpy()
        deviations = values - values.mean(1, keepdims=True)
        combined = combined + factor * deviations / (values.std(1, keepdims=True) + 1e-4)
    expected = combined / ((combined**2).mean() ** 0.5 + 1e-4)
    ours, _ = gdpo_advantages(rewards, factors)
    np.testing.assert_allclose(ours.numpy(), expected, rtol=1e-5, atol=1e-6)
    assert float(ours.square().mean()) == pytest.approx(1, abs=1e-3)


def test_gdpo_keeps_what_cancels_in_a_sum_and_drops_what_has_no_signal():
    rewards = {
        "a": torch.tensor([[0.0, 1, 0, 1], [5, 5, 5, 5], [0, 0, 1, 1]]),
        "b": torch.tensor([[0.0, 0, 3, 3], [1, 1, 1, 1], [1, 1, 0, 0]]),
        "c": torch.tensor([[4.0, 3, 1, 0], [2, 2, 2, 2], [0, 0, 0, 0]]),
    }
    assert (sum(rewards.values())[0] == 4).all()  # equal totals
    ours, weights = gdpo_advantages(rewards, dict.fromkeys(rewards, 1.0))
    # the third group's two rewards are at odds, and are worth the same
    assert weights.tolist() == [[1.0] * 4, [0.0] * 4, [0.0] * 4]
    assert ours[0].abs().min() > 0.1 and not ours[1:].any()
    nothing, weights = gdpo_advantages({"a": torch.ones(2, 4)}, {"a": 1.0})
    assert not nothing.any() and not weights.any()


def test_gdpo_scales_neither_with_a_reward_nor_with_groups_without_signal():
    rewards, factors = _unlike_rewards(), {"pick": 1.0, "ocr": 1.0}
    ours, _ = gdpo_advantages(rewards, factors)
    larger, _ = gdpo_advantages({**rewards, "ocr": 7 * rewards["ocr"] + 3}, factors)
    torch.testing.assert_close(larger, ours, rtol=2e-3, atol=2e-3)
    watched = {**rewards, "watched": torch.rand(8, 16)}
    assert torch.equal(gdpo_advantages(watched, factors | {"watched": 0.0})[0], ours)
    padded = {name: torch.cat([value, torch.ones(5, 16)]) for name, value in rewards.items()}
    assert torch.equal(gdpo_advantages(padded, factors)[0][:8], ours)


def test_gdpo_of_all_ranks():
    """Two ranks with one half each scale as the whole does, through one sum."""
    rewards, factors = _unlike_rewards(), {"pick": 1.0, "ocr": 1.0}
    halves = [{name: value[rank::2] for name, value in rewards.items()} for rank in range(2)]
    moments = []
    for half in halves:
        gdpo_advantages(
            half, factors, all_reduce=lambda value: moments.append(value.clone()) or value
        )
    total = moments[0] + moments[1]
    parts = [gdpo_advantages(half, factors, all_reduce=lambda _: total)[0] for half in halves]
    whole, _ = gdpo_advantages(rewards, factors)
    torch.testing.assert_close(torch.stack(parts, dim=1).flatten(0, 1), whole)


def test_gdpo_takes_rewards_that_differ_by_rounding_for_equal() -> None:
    real_PG = torch.tensor([[0.0, 1.0, 0.0, 1.0], [0.5, 0.5, 0.5, 0.5]])
    rounded_PG = real_PG.clone()
    rounded_PG[1, 0] += 1e-7
    expected_PG, _ = gdpo_advantages({"a": real_PG}, {"a": 1.0})
    advantages_PG, weights_PG = gdpo_advantages({"a": rounded_PG}, {"a": 1.0})
    assert weights_PG.tolist() == [[1.0] * 4, [0.0] * 4]
    torch.testing.assert_close(advantages_PG[0], expected_PG[0])


NAN = float("nan")


@pytest.mark.parametrize("kind", ["group", "global", "none"])
def test_a_sample_without_a_reward_has_no_part_in_it(kind: str) -> None:
    """The others get what they would without it; fewer than two are no group."""
    gap_PG = torch.tensor([[1.0, NAN, 3, 6], [0, 0, 1, 1], [NAN, NAN, NAN, 2.0]])
    advantages_PG, weights_PG = group_advantages(gap_PG, kind=kind)
    assert weights_PG.tolist() == [[1, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]]
    assert not advantages_PG[weights_PG == 0].any()

    left = gap_PG[0, [0, 2, 3]].double()
    deviation = {
        "group": left.std(correction=0) + 1e-4,
        "global": gap_PG[~gap_PG.isnan()].double().std(correction=0) + 1e-4,
        "none": 1.0,
    }[kind]
    expected = (left - left.mean()) / deviation
    torch.testing.assert_close(advantages_PG[0, [0, 2, 3]].double(), expected)


def test_gdpo_of_routed_rewards_and_failed_samples() -> None:
    """A reward that is not asked adds nothing; a failed sample is left out of the others' mean."""
    rewards = {
        "text": torch.tensor([[0.0, 1, 0, 1], [NAN] * 4, [0, 1, NAN, 1]]),
        "place": torch.tensor([[NAN] * 4, [0.2, 0.1, 0.2, 0.1], [0.5] * 4]),
    }
    scored_PG = torch.tensor([[True] * 4, [True] * 4, [True, True, False, True]])
    weights = {"text": 1.0, "place": 1.0}
    ours_PG, weights_PG = gdpo_advantages(rewards, weights, scored_PG=scored_PG)
    assert weights_PG.tolist() == [[1] * 4, [1] * 4, [1, 1, 0, 1]]
    alone_PG, _ = group_advantages(torch.tensor([[0.0, 1, 1]]), kind="group")
    ratio = ours_PG[2, [0, 1, 3]] / alone_PG[0]
    torch.testing.assert_close(ratio, ratio[:1].expand(3))  # but for the batch's scale
    assert ours_PG[2, 2] == 0 and ours_PG.isfinite().all()
