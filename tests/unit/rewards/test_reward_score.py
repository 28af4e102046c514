from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from megadiff.config.rewards import RewardConfig
from megadiff.process.workers import share_of_cores
from megadiff.rewards.base import Reward, RewardError, RewardSample
from megadiff.rewards.score import MAX_WORKERS, Scorer
from megadiff.types import RolloutGroup

MakeGroup = Callable[..., RolloutGroup]
RELEASE = threading.Event()
CALLS: list[tuple[str, int]] = []


def value_of(sample: RewardSample) -> float:
    return float(sample.pixels[0, 0, 0, 0])


class Value(Reward):
    """The grey value; slower for small ones, so that calls finish out of order."""

    def __init__(self, *, samples_per_call: int | None = None, slow_s: float = 0.02) -> None:
        self.samples_per_call = samples_per_call
        self.slow_s = slow_s

    def score(self, samples: Sequence[RewardSample]) -> list[float]:
        CALLS.append((samples[0].prompt.text, len(samples)))
        time.sleep(self.slow_s if value_of(samples[0]) < 50 else 0)
        return [value_of(sample) for sample in samples]


class Raises(Reward):
    """Fails on grey value 99, in a batch as well as alone."""

    def score(self, samples: Sequence[RewardSample]) -> list[float]:
        CALLS.append((samples[0].prompt.text, len(samples)))
        if any(value_of(sample) == 99 for sample in samples):
            raise ValueError("no such judge")
        return [0.0] * len(samples)


class Flat(Reward):
    def score(self, samples: Sequence[RewardSample]) -> torch.Tensor:
        return torch.full((len(samples),), 0.5)


class Hangs(Reward):
    def score(self, samples: Sequence[RewardSample]) -> list[float]:
        RELEASE.wait(30)
        return [0.0] * len(samples)


@pytest.fixture(autouse=True)
def released(scorer: Callable[..., Scorer]) -> Iterator[None]:
    """Calls that hang end before their scorer is closed."""
    CALLS.clear()
    RELEASE.clear()
    yield
    RELEASE.set()


def config(
    class_name: str, weight: float = 1.0, timeout_s: float = 20.0, **args: object
) -> RewardConfig:
    reward_type = f"{__name__}:{class_name}"
    return RewardConfig(type=reward_type, weight=weight, timeout_s=timeout_s, args=args)


@pytest.mark.parametrize("chunk", [None, 1, 2])
@pytest.mark.parametrize("num_workers", [1, 4])
def test_values_come_back_in_order_of_submission(
    scorer: Callable[..., Scorer], make_group: MakeGroup, chunk: int | None, num_workers: int
) -> None:
    scores = scorer(
        num_workers=num_workers,
        value=config("Value", 0.5, samples_per_call=chunk),
        flat=config("Flat", 2.0),
    )
    for step in range(2):  # a scorer serves every step of a run
        rows = [[10 + step, 200, 30], [100, 20, 1], [5, 6, 255]]
        for i, row in enumerate(rows):
            scores.submit(make_group(row, f"red {i}"))
        result = scores.collect()
        assert list(result) == ["value", "flat", "total"]
        assert all(each.dtype == torch.float32 and each.shape == (3, 3) for each in result.values())
        assert result["value"].tolist() == rows
        assert torch.equal(result["total"], 0.5 * torch.tensor(rows) + 1.0)
    assert {count for _, count in CALLS} == {3: {3}, 1: {1}, 2: {2, 1}}[chunk or 3]
    assert scores.pop_figures()["value"]["seconds"] > 0


def test_a_failure_cancels_the_rest_and_the_scorer_lives_on(
    scorer: Callable[..., Scorer], make_group: MakeGroup
) -> None:
    scores = scorer(
        num_workers=1, judge=config("Raises"), value=config("Value", samples_per_call=1)
    )
    groups = [make_group([99] * 8, "first")] + [
        make_group([1] * 8, f"later {i}") for i in range(40)
    ]
    with pytest.raises(RewardError, match="first"):
        scores.score(groups)
    assert scores.score([make_group([7], "red")])["value"].tolist() == [[7.0]]
    assert (
        len(CALLS) < 50
    )  # of 363: the worker took what was left of the failed step, and ran none of it


def test_a_failure_shows_at_the_next_submit(
    scorer: Callable[..., Scorer], make_group: MakeGroup
) -> None:
    scores = scorer(judge=config("Raises"))
    scores.submit(make_group([99]))
    time.sleep(0.3)
    with pytest.raises(RewardError, match="no such judge"):
        scores.submit(make_group([1]))


def test_a_reward_that_hangs_is_named_within_its_time(
    scorer: Callable[..., Scorer], make_group: MakeGroup
) -> None:
    scores = scorer(judge=config("Hangs", timeout_s=0.3), value=config("Value"))
    started = time.monotonic()
    with pytest.raises(
        RewardError, match=r"reward 'judge' on samples 0, 1 of prompt .* longer than timeout_s=0.3"
    ):
        scores.score([make_group([1, 2]), make_group([3, 4])])
    assert time.monotonic() - started < 10
    scores.close()
    assert time.monotonic() - started < 20


def test_waiting_in_the_queue_is_not_counted(
    scorer: Callable[..., Scorer], make_group: MakeGroup
) -> None:
    scores = scorer(num_workers=1, value=config("Value", timeout_s=1.0, slow_s=0.1))
    assert (
        scores.score([make_group([1]) for _ in range(12)])["value"].sum() == 12
    )  # 1.2 s in all, 0.1 s each


def test_reset_forgets_what_was_submitted(
    scorer: Callable[..., Scorer], make_group: MakeGroup
) -> None:
    scores = scorer(num_workers=1, value=config("Value"))
    for i in range(20):
        scores.submit(make_group([i]))
    scores.reset()
    assert scores.score([make_group([200])])["value"].tolist() == [[200.0]]


def test_validate_names_the_reward(scorer: Callable[..., Scorer], make_group: MakeGroup) -> None:
    scores = scorer(hue=RewardConfig(type="color"))
    scores.validate([make_group([1], "a red fox").prompt])
    with pytest.raises(ValueError, match=r"reward\.hue: .*'a fox'"):
        scores.validate([make_group([1], "a red fox").prompt, make_group([1], "a fox").prompt])


def test_close_stops_the_workers(scorer: Callable[..., Scorer], make_group: MakeGroup) -> None:
    scores = scorer(num_workers=3, value=config("Value"))
    before = set(threading.enumerate())
    scores.score([make_group([1])])
    assert len(set(threading.enumerate()) - before) == 4  # three workers, and who watches the GIL
    scores.close()
    assert set(threading.enumerate()) <= before


def test_close_reaches_every_reward_and_logs_what_one_raises(
    scorer: Callable[..., Scorer], caplog: pytest.LogCaptureFixture
) -> None:
    scores = scorer(first=config("Value"), second=config("Value"))
    closed = []

    def fail() -> None:
        raise OSError("no such socket")

    scores.rewards["first"].close = fail
    scores.rewards["second"].close = lambda: closed.append("second")
    scores.close()
    assert closed == ["second"]
    assert "reward 'first' could not be closed" in caplog.text
    assert "no such socket" in caplog.text
    scores.rewards.clear()


@pytest.mark.parametrize(
    ("configs", "message"),
    [
        ({"total": RewardConfig(type="color")}, "reward.total"),
        ({"c": RewardConfig(type="color", weight=float("nan"))}, "reward.c.weight=nan"),
        ({"c": RewardConfig(type="color", weight=1e39)}, r"weight=1e\+39.*at most 3.4e\+38"),
        ({}, "0 rewards"),
    ],
)
def test_refused_configs(configs: dict[str, RewardConfig], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Scorer(configs)


def test_workers_are_a_ranks_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megadiff.process.workers.start_cpus", lambda: range(64))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    assert share_of_cores(MAX_WORKERS) == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "128")
    assert share_of_cores(MAX_WORKERS) == 1
