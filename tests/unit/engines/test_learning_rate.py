"""Learning-rate schedules: their ends, their course, and that nothing but the count decides."""

from __future__ import annotations

from itertools import pairwise

import pytest

from megadiff.config.schema import Config
from megadiff.engines.optimizer import learning_rate

LR, WARMUP, STEPS, UPDATES = 3e-4, 4, 10, 2
TOTAL = STEPS * UPDATES


def _rates(schedule: str, *, warmup: int = WARMUP, steps: int = STEPS) -> list[float]:
    """Return the rate of every update of a run, and what would come after the last."""
    config = Config()
    config.optim.lr, config.optim.component_lr = LR, {"transformer_2": LR / 10}
    config.optim.schedule, config.optim.warmup_steps = schedule, warmup
    config.train.num_steps, config.train.updates_per_step = steps, UPDATES
    count = range(steps * UPDATES + 1)
    rates = [learning_rate(config, "transformer", num_updates=number) for number in count]
    second = [learning_rate(config, "transformer_2", num_updates=number) for number in count]
    assert second == pytest.approx([rate / 10 for rate in rates], rel=1e-12)
    return rates


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear"])
def test_all_rise_alike_to_the_full_rate(schedule: str) -> None:
    rates = _rates(schedule)
    assert rates[:WARMUP] == [LR * (1 / 4), LR * (2 / 4), LR * (3 / 4), LR]
    assert rates[WARMUP] == LR  # where the fall begins
    assert _rates(schedule, warmup=0)[0] == LR


def test_constant_stays() -> None:
    assert _rates("constant")[WARMUP:] == [LR] * (TOTAL - WARMUP + 1)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_the_fall_is_monotone_and_would_be_0_after_the_last_update(schedule: str) -> None:
    falling = _rates(schedule)[WARMUP:]
    assert all(first > second for first, second in pairwise(falling))
    assert falling[-1] == pytest.approx(0, abs=1e-20) and falling[-2] > 0
    # both are symmetric about the middle of the fall
    assert falling[len(falling) // 2] == pytest.approx(LR / 2)
    mirrored = [LR - rate for rate in reversed(falling)]
    assert falling == pytest.approx(mirrored, abs=1e-18)


def test_cosine_is_level_at_both_ends_and_linear_nowhere() -> None:
    steps = {name: _differences(_rates(name)[WARMUP:]) for name in ("cosine", "linear")}
    assert steps["linear"] == pytest.approx([LR / (TOTAL - WARMUP)] * (TOTAL - WARMUP))
    assert steps["cosine"][0] < steps["linear"][0] / 4
    assert max(steps["cosine"]) == pytest.approx(LR / (TOTAL - WARMUP) * 3.14159 / 2, rel=0.02)


def test_a_run_that_is_made_longer_falls_later() -> None:
    short, longer = _rates("linear"), _rates("linear", steps=2 * STEPS)
    assert all(first < second for first, second in zip(short[5:], longer[5:TOTAL], strict=False))
    # one that is made shorter than its checkpoint takes no update, and no negative rate
    config = Config()
    config.optim.lr, config.optim.schedule = LR, "linear"
    config.train.num_steps = 1
    assert learning_rate(config, "transformer", num_updates=5) == 0


def _differences(values: list[float]) -> list[float]:
    return [first - second for first, second in pairwise(values)]
