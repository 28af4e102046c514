from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from megadiff.rewards.base import RewardSample
from megadiff.rewards.jpeg_size import JpegSizeReward, jpeg_kib

MakeSample = Callable[..., RewardSample]


def noise(size: int, amplitude: int = 255) -> np.ndarray:
    values = np.random.default_rng(0).uniform(-amplitude / 2, amplitude / 2, (size, size, 3))
    return np.clip(127.5 + values, 0, 255).astype(np.uint8)


@pytest.mark.parametrize("size", [64, 512])
def test_more_noise_is_less_compressible_within_zero_and_one(
    size: int, make_sample: MakeSample
) -> None:
    samples = [make_sample(noise(size, amplitude)) for amplitude in (0, 16, 64, 255)]
    small, large = JpegSizeReward().score(samples), JpegSizeReward(sign=-1).score(samples)
    assert small == sorted(small, reverse=True) and small[0] > 0.85 and 0.05 < small[-1] < 0.3
    np.testing.assert_allclose(np.add(small, large), 1.0)


def test_formula(make_sample: MakeSample) -> None:
    pixels = noise(64)
    assert JpegSizeReward().score([make_sample(pixels)])[0] == pytest.approx(
        1 - jpeg_kib(pixels, quality=95) / (64 * 64 * 1.5 / 1024)
    )


def test_video_is_the_mean_of_its_frames_and_tiny_images_stay_in_range(
    make_sample: MakeSample,
) -> None:
    frames = np.stack([noise(64, 0), noise(64, 255)])
    each = JpegSizeReward().score([make_sample(frame) for frame in frames])
    assert JpegSizeReward().score([make_sample(frames)])[0] == pytest.approx(np.mean(each))
    assert JpegSizeReward().score([make_sample(np.zeros((1, 1, 3), np.uint8))]) == [0.0]


def test_lower_quality_makes_smaller_files() -> None:
    assert jpeg_kib(noise(64), quality=30) < jpeg_kib(noise(64), quality=95)
