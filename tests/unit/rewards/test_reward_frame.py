from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from megadiff.config.rewards import RewardConfig
from megadiff.rewards.base import Reward, RewardError, RewardSample, build_reward
from megadiff.rewards.frame import FrameReward, frame_indices

MakeSample = Callable[..., RewardSample]
RED, BLUE = (255, 0, 0), (0, 0, 255)


def video(*colors: tuple[int, int, int]) -> np.ndarray:
    return np.stack([np.full((8, 8, 3), color, np.uint8) for color in colors])


class Rank(Reward):
    """A judge: the samples' places when sorted by brightness. It needs the whole group."""

    def score(self, samples: Sequence[RewardSample]) -> np.ndarray:
        assert all(len(sample.pixels) == 1 for sample in samples)
        return np.argsort(np.argsort([sample.pixels.mean() for sample in samples])).astype(float)


@pytest.mark.parametrize(
    ("frames", "wanted"),
    [
        ("first", [0]),
        ("middle", [4]),
        ("last", [8]),
        ("all", list(range(9))),
        (1, [4]),
        (2, [0, 8]),
        (3, [0, 4, 8]),
    ]
    + [(9, list(range(9))), (100, list(range(9)))],
)
def test_which_frames_are_looked_at(frames: str | int, wanted: list[int]) -> None:
    assert frame_indices(9, frames) == wanted
    assert frame_indices(1, frames) == [0]


def test_the_other_rewards_limits_are_its_own() -> None:
    """Also that a call is not given up before the other reward's servers' failure is known."""
    args = {"reward": "remote", "args": {"url": "http://127.0.0.1:1", "deadline_s": 240}}
    assert build_reward("far", RewardConfig(type="frame", args=args)).deadline_s == 240
    long = {"reward": "remote", "args": {**args["args"], "deadline_s": 400}}
    assert build_reward("far", RewardConfig(type="frame", args=long, timeout_s=900))
    with pytest.raises(ValueError, match=r"deadline_s=240 and reward.far.timeout_s=200"):
        build_reward("far", RewardConfig(type="frame", args=args, timeout_s=200))


@pytest.mark.parametrize(
    ("args", "value"),
    [
        ({}, 2 / 3),
        ({"reduce": "min"}, 0.0),
        ({"frames": "first"}, 1.0),
        ({"frames": "last"}, 0.0),
        ({"frames": 2}, 0.5),
    ],
)
def test_color_on_frames(make_sample: MakeSample, args: dict, value: float) -> None:
    reward = build_reward("red", RewardConfig(type="frame", args={"reward": "color", **args}))
    color = build_reward("color", RewardConfig(type="color"))
    blue = color.score([make_sample(video(BLUE), "a red wall")])[0]
    wanted = value + (1 - value) * blue
    assert reward.score([make_sample(video(RED, RED, BLUE), "a red wall")]) == [
        pytest.approx(wanted)
    ]


def test_a_judge_compares_the_samples_moment_by_moment(make_sample: MakeSample) -> None:
    reward = FrameReward(reward=f"{__name__}:Rank")
    dark, light = (0, 0, 0), (255, 255, 255)
    samples = [
        make_sample(video(dark, light)),
        make_sample(video(light, dark)),
        make_sample(video(RED, RED)),
    ]
    assert reward.score(samples) == [1.0, 1.0, 1.0]
    assert reward.samples_per_call is None and FrameReward(reward="ocr").samples_per_call == 1


def test_text_is_read_on_the_frames_that_are_asked_for(make_sample: MakeSample) -> None:
    cv2 = pytest.importorskip("cv2")
    pytest.importorskip("rapidocr_onnxruntime")
    frames = np.full((3, 128, 384, 3), 255, np.uint8)
    for frame in frames[1:]:
        cv2.putText(frame, "OPEN", (60, 90), cv2.FONT_HERSHEY_SIMPLEX, 3, (0, 0, 0), 6)
    sample = make_sample(frames, 'a sign that says "OPEN"')
    values = {
        frames: FrameReward(reward="ocr", frames=frames).score([sample])[0]
        for frames in ("first", "last", "all")
    }
    assert values == {"first": 0.0, "last": 1.0, "all": pytest.approx(2 / 3)}
    with pytest.raises(ValueError, match="the ocr reward needs text"):
        FrameReward(reward="ocr").validate([make_sample(frames, "a sign").prompt])


def test_faults_of_the_inner_reward_keep_its_name(make_sample: MakeSample) -> None:
    with pytest.raises(
        RewardError, match="reward 'color' on sample 0 of prompt 'a wall' raised ValueError"
    ):
        FrameReward(reward="color").score([make_sample(video(RED), "a wall")])
    with pytest.raises(ValueError, match=r"have \[1, 2\] frames"):
        FrameReward(reward="color").score([make_sample(video(RED)), make_sample(video(RED, RED))])


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({}, "missing a required argument: 'reward'"),
        ({"reward": "colr"}, "did you mean 'color'"),
        ({"reward": "color", "frames": 0}, "frames=0, must be first, middle, last, all"),
        ({"reward": "color", "frames": "some"}, "frames='some'"),
        ({"reward": "color", "reduce": "max"}, "reduce='max', must be one of mean, min"),
        ({"reward": "ocr", "args": {"strid": 1}}, "strid"),
    ],
)
def test_mistakes_in_the_config_are_named(args: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build_reward("f", RewardConfig(type="frame", args=args))
