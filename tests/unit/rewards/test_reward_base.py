from __future__ import annotations

from pathlib import Path

import pytest

from megadiff.config.rewards import RewardConfig
from megadiff.rewards import REWARDS
from megadiff.rewards.base import Reward, build_reward, build_rewards

MY_REWARDS = """
from megadiff.rewards.base import Reward
class Good(Reward):
    def __init__(self, *, scale=1.0):
        self.scale = scale
    def score(self, samples):
        return [self.scale for _ in samples]
class NotOne:
    pass
class Calls(Good):
    def __init__(self, *, count):
        self.samples_per_call = count
"""


@pytest.fixture
def my_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_test_rewards.py").write_text(MY_REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    return "my_test_rewards"


@pytest.mark.parametrize("reward_type", sorted(REWARDS))
def test_every_reward_of_the_table_builds_and_knows_its_name(reward_type: str) -> None:
    args = {
        "frame": {"reward": "color"},
        "clip": {"path": "/clip", "score": "hpsv2"},
        "geneval": {"path": "assets/detector"},
        "remote": {"url": "http://127.0.0.1:9000"},
        "vlm": {"judge": "qwen"},
    }
    config = RewardConfig(type=reward_type, args=args.get(reward_type, {}))
    reward = build_reward("mine", config)
    assert isinstance(reward, Reward) and reward.name == "mine"


def test_dotted_path_with_args(my_module: str) -> None:
    reward = build_reward("mine", RewardConfig(type=f"{my_module}:Good", args={"scale": 2.5}))
    assert reward.score([None, None]) == [2.5, 2.5]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            RewardConfig(type="colour"),
            ["reward.r.type=colour", "did you mean 'color'", "jpeg_size, motion, ocr"],
        ),
        (RewardConfig(type="no_such_pkg.mod:X"), ["reward.r.type", "no_such_pkg", "PYTHONPATH"]),
        (RewardConfig(type="my_test_rewards:Goood"), ["Goood", "did you mean 'Good'"]),
        (
            RewardConfig(type="my_test_rewards:NotOne"),
            ["NotOne", "not a class derived from megadiff.rewards.base.Reward"],
        ),
        (
            RewardConfig(type="jpeg_size", args={"qualty": 9}),
            ["reward.r.args", "qualty", "did you mean 'quality'"],
        ),
        (
            RewardConfig(type="jpeg_size", args={"quality": 500}),
            ["reward.r.args", "quality=500", "1..95"],
        ),
        (RewardConfig(type="jpeg_size", args={"quality": "high"}), ["reward.r.args", "high"]),
        (RewardConfig(type="jpeg_size", args={"sign": 2}), ["sign=2"]),
        (RewardConfig(type="ocr", args={"frame_stride": 0}), ["frame_stride=0"]),
        (RewardConfig(type="color", args={"x": 1}), ["reward.r.args", "'x'", "no arguments"]),
    ],
)
def test_refusals_name_what_is_wrong(
    my_module: str, config: RewardConfig, words: list[str]
) -> None:
    with pytest.raises(ValueError) as caught:
        build_reward("r", config)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("count", [0, -1, 1.0, "2", True])
def test_samples_per_call_is_at_least_one(my_module: str, count: object) -> None:
    config = RewardConfig(type=f"{my_module}:Calls", args={"count": count})
    words = rf"reward\.r: samples_per_call={count!r} .*at least 1, or None"
    with pytest.raises(ValueError, match=words):
        build_reward("r", config)


def test_a_run_needs_a_reward() -> None:
    with pytest.raises(ValueError, match="0 rewards"):
        build_rewards({})


def test_a_call_may_not_outlast_its_limit() -> None:
    config = RewardConfig(
        type="remote", args={"url": "http://a", "deadline_s": 600}, timeout_s=300.0
    )
    with pytest.raises(ValueError, match=r"deadline_s=600 and reward\.far\.timeout_s=300: "):
        build_reward("far", config)


class NoScore(Reward):
    """Lacks what a reward is for."""


def no_class(samples):
    return [0.0 for _ in samples]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("NoScore", f"{__name__}:NoScore does not define score"),
        ("no_class", "'no_class' is not a class derived from megadiff.rewards.base.Reward; write"),
    ],
)
def test_what_cannot_score_is_refused_when_it_is_built(name, words):
    with pytest.raises(ValueError) as caught:
        build_reward("mine", RewardConfig(type=f"{__name__}:{name}"))
    assert words in str(caught.value)
    assert "write class X(Reward) with score(self, samples)" in str(caught.value)
