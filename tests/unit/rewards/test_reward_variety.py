"""Variety pays the odd one out, and only where the prompt leaves the colour open."""

import numpy as np
import pytest

from megadiff.rewards.base import RewardSample
from megadiff.rewards.variety import VarietyReward
from megadiff.types import Prompt

RED = (255, 0, 0)
BLUE = (0, 0, 255)


def sample(colour: tuple[int, int, int], text: str = "a star", frames: int = 1) -> RewardSample:
    pixels = np.full((frames, 64, 64, 3), 220, np.uint8)
    pixels[frames // 2, 20:40, 20:40] = colour
    return RewardSample(pixels=pixels, prompt=Prompt(text=text, id="0" * 16), sample_index=0)


@pytest.mark.parametrize("frames", [1, 3])
def test_the_odd_one_out_scores_most(frames: int) -> None:
    scores = VarietyReward().score([sample(colour, frames=frames) for colour in (RED, RED, BLUE)])
    assert scores == pytest.approx([0.5, 0.5, 1.0])


def test_equal_samples_score_nothing() -> None:
    assert VarietyReward().score([sample(RED)] * 3) == pytest.approx([0.0] * 3)


def test_where_a_colour_is_asked_for_all_score_nothing() -> None:
    assert VarietyReward().score([sample(RED, "a red star"), sample(BLUE, "a red star")]) == [0, 0]


def test_one_sample_alone_scores_nothing() -> None:
    assert VarietyReward().score([sample(RED)]) == [0.0]
