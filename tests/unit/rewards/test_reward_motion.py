from __future__ import annotations

from collections.abc import Callable

import cv2
import numpy as np
import pytest

from megadiff.rewards.base import RewardSample
from megadiff.rewards.motion import MotionReward, TemporalConsistencyReward, mean_flow

MakeSample = Callable[..., RewardSample]


def landscape(height: int, width: int) -> np.ndarray:
    noise = np.random.default_rng(0).uniform(0, 255, (height, width, 3)).astype(np.float32)
    return cv2.normalize(
        cv2.GaussianBlur(noise, (0, 0), height / 24), None, 0, 255, cv2.NORM_MINMAX
    ).astype(np.uint8)


def pan(step: float, *, size: int = 64, num_frames: int = 6) -> np.ndarray:
    """A camera that moves right by `step` pixels a frame."""
    wide = landscape(size, 4 * size)
    shifts = [np.float32([[1, 0, -step * frame], [0, 1, 0]]) for frame in range(num_frames)]
    return np.stack([cv2.warpAffine(wide, shift, (size, size)) for shift in shifts])


@pytest.mark.parametrize("step", [0.5, 1.0, 2.0, 4.0])
def test_flow_is_the_speed_of_the_camera(make_sample: MakeSample, step: float) -> None:
    assert mean_flow(make_sample(pan(step)), pairs=0) == pytest.approx(step / 64, rel=0.05)


def test_flow_is_the_same_at_every_resolution(make_sample: MakeSample) -> None:
    small, large = pan(2.0), np.stack([cv2.resize(frame, (512, 512)) for frame in pan(2.0)])
    assert mean_flow(make_sample(large), pairs=0) == pytest.approx(
        mean_flow(make_sample(small), pairs=0), rel=0.05
    )


def test_motion_is_one_within_its_band_and_falls_on_both_sides(make_sample: MakeSample) -> None:
    reward = MotionReward(low=0.01, high=0.04, pairs=0)
    values = reward.score([make_sample(pan(step)) for step in (0.0, 0.32, 1.0, 2.0, 5.12)])
    assert values == pytest.approx([0.0, 0.5, 1.0, 1.0, 0.5], abs=0.03)


def test_consistency_is_high_for_motion_and_low_for_flicker_cuts_and_noise(
    make_sample: MakeSample,
) -> None:
    reward = TemporalConsistencyReward(pairs=0)
    still, moving = pan(0.0), pan(2.0)
    flicker = moving.copy()
    flicker[::2] //= 2
    cut = np.concatenate([moving[:3], pan(2.0, num_frames=90)[-3:]])
    noise = np.random.default_rng(1).integers(0, 256, moving.shape).astype(np.uint8)
    values = dict(
        zip(
            "still moving cut flicker noise".split(),
            reward.score([make_sample(each) for each in (still, moving, cut, flicker, noise)]),
        )
    )
    assert values["still"] > 0.999 and values["moving"] > 0.95
    assert (
        values["moving"] > values["cut"] + 0.1
        and 0 < max(values["flicker"], values["noise"]) < 0.2 < values["cut"]
    )


@pytest.mark.parametrize("size", [1, 3, 17])
def test_any_size_has_a_value(make_sample: MakeSample, size: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, size, 2 * size, 3)).astype(np.uint8)
    for reward in (MotionReward(), TemporalConsistencyReward()):
        assert 0 <= reward.score([make_sample(pixels)])[0] <= 1


def test_pairs_are_spread_over_the_video(make_sample: MakeSample) -> None:
    pixels = pan(1.0, num_frames=20)
    pixels[9:11] = 0  # a cut there and back, of which 3 pairs (0, 9, 18) see nothing
    everything, few = (
        TemporalConsistencyReward(pairs=pairs).score([make_sample(pixels)])[0] for pairs in (0, 3)
    )
    assert everything < 0.95 < few


def test_an_image_has_no_motion(make_sample: MakeSample) -> None:
    for reward in (MotionReward(), TemporalConsistencyReward()):
        with pytest.raises(ValueError, match="at least 2 frames, found 1; set rollout.num_frames"):
            reward.score([make_sample(pan(0.0)[:1])])


@pytest.mark.parametrize(
    ("reward", "args", "words"),
    [
        (MotionReward, {"low": 0.0}, "low=0.0"),
        (MotionReward, {"low": 0.2, "high": 0.1}, "0 < low ≤ high"),
        (MotionReward, {"high": float("inf")}, "high=inf"),
        (MotionReward, {"pairs": -1}, "pairs=-1"),
        (TemporalConsistencyReward, {"tolerance": 0}, "tolerance=0 is outside"),
        (TemporalConsistencyReward, {"pairs": 1.5}, "pairs=1.5"),
    ],
)
def test_arguments_out_of_range_are_refused(reward: type, args: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        reward(**args)
