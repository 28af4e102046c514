from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megadiff.data.prompts import load_prompts
from megadiff.rewards.base import RewardSample
from megadiff.rewards.color import COLORS, ColorReward, closeness, named_color, oklab

MakeSample = Callable[..., RewardSample]


def flat(rgb: tuple[int, int, int], size: int = 8) -> np.ndarray:
    return np.full((size, size, 3), rgb, np.uint8)


@pytest.mark.parametrize("color", COLORS)
def test_the_colour_itself_is_best_and_scores_one(color: str) -> None:
    assert closeness(flat(COLORS[color]), color) == pytest.approx(1.0, abs=1e-6)
    for other in COLORS.keys() - {color}:
        assert closeness(flat(COLORS[other]), color) < 0.97


def test_the_range_is_all_of_zero_to_one() -> None:
    levels = np.arange(0, 256, 15, dtype=np.uint8)
    cube = np.stack(np.meshgrid(levels, levels, levels, indexing="ij"), -1).reshape(-1, 1, 1, 3)
    for color in COLORS:
        scores = [closeness(pixel, color) for pixel in cube]
        assert min(scores) == pytest.approx(0.0, abs=1e-6) and max(scores) <= 1.0


def test_oklab_of_reference_colours() -> None:
    # Published values of the colour space's author, rounded: sRGB red, green, blue and white.
    pixels = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 255]], np.uint8)
    expected = [
        [0.628, 0.225, 0.126],
        [0.866, -0.234, 0.179],
        [0.452, -0.032, -0.312],
        [1.0, 0.0, 0.0],
    ]
    np.testing.assert_allclose(oklab(pixels), expected, atol=1e-3)


def test_dense_every_pixel_that_moves_nearer_raises_the_reward() -> None:
    image = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    score = closeness(image, "blue")
    for row in range(16):
        image[row] = COLORS["blue"]
        better = closeness(image, "blue")
        assert better > score
        score = better
    assert score == pytest.approx(1.0, abs=1e-6)


def test_smooth_from_grey_to_red() -> None:
    steps = [closeness(flat((128 + i, 128 - i, 128 - i)), "red") for i in range(0, 128, 4)]
    differences = np.diff(steps)
    assert (differences > 0).all() and differences.max() < 0.05


def test_mean_over_frames_and_blocks_does_not_depend_on_the_split() -> None:
    video = np.random.default_rng(1).integers(0, 256, (3, 200, 150, 3), dtype=np.uint8)
    per_frame = [closeness(frame, "green") for frame in video]
    assert closeness(video, "green") == pytest.approx(np.mean(per_frame), abs=1e-6)


@pytest.mark.parametrize(
    ("text", "color"),
    [
        ("a red circle", "red"),
        ("A photo of a BLUE cup", "blue"),
        ("a grey stone", "gray"),
        ("a red cup on a blue table", "red"),
        ("un café, then a dark-green wall", "green"),
        ("bored at the orange-tree", "orange"),
        ("红 yellow 花", "yellow"),
    ],
)
def test_first_whole_colour_word_counts(text: str, color: str, make_sample: MakeSample) -> None:
    assert named_color(make_sample(flat((0, 0, 0)), text).prompt) == color


@pytest.mark.parametrize("text", ["a circle", "a bored blackbird", "a reddish fox"])
def test_a_prompt_without_colour_fails_at_start(text: str, make_sample: MakeSample) -> None:
    with pytest.raises(ValueError) as caught:
        ColorReward().validate([make_sample(flat((0, 0, 0)), text).prompt])
    assert text in str(caught.value) and "red, orange" in str(caught.value)


def test_one_pixel_and_huge_images(make_sample: MakeSample) -> None:
    for pixels in (np.zeros((1, 1, 3), np.uint8), np.zeros((3000, 2000, 3), np.uint8)):
        assert ColorReward().score([make_sample(pixels)]) == pytest.approx([0.0], abs=0.2)


def test_shipped_prompts_name_colours_and_are_distinct() -> None:
    prompts = load_prompts(Path(__file__).parents[3] / "assets/prompts/colors.txt", max_chars=2000)
    ColorReward().validate(prompts)
    assert len({prompt.id for prompt in prompts}) == len(prompts) >= 24
