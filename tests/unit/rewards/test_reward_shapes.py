from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megadiff.config.schema import RewardConfig
from megadiff.data.prompts import load_prompts
from megadiff.rewards.base import Reward, RewardSample, build_reward
from megadiff.shapes.world import parse, render

MakeSample = Callable[..., RewardSample]


def build(name: str) -> Reward:
    return build_reward(name, RewardConfig(type=name))


@pytest.fixture
def picture() -> np.ndarray:
    return render(parse("a red circle left of a blue star"), np.random.default_rng(0))


@pytest.mark.parametrize(
    ("text", "dense", "strict"),
    [
        ("a red circle left of a blue star", 1.0, 1.0),
        ("a circle and a star", 1.0, 1.0),
        ("a red circle right of a blue star", 0.35, 0.0),  # both objects: half of what is left without the relation
        ("a red circle and a green star", 0.4, 0.0),
        ("a red circle", 0.25, 0.0),
        ("four cyan triangles", 0.5 * 2 * 0.1 / 4, 0.0),
    ],
)
def test_values(text: str, dense: float, strict: float, picture: np.ndarray, make_sample: MakeSample) -> None:
    sample = make_sample(picture, text)
    assert build("shapes").score([sample]) == pytest.approx([dense])
    assert build("shapes_strict").score([sample]) == [strict]


def test_mean_over_frames(picture: np.ndarray, make_sample: MakeSample) -> None:
    video = make_sample(np.stack([picture, np.zeros_like(picture)]), "a circle and a star")
    assert build("shapes").score([video, video]) == build("shapes_strict").score([video, video]) == [0.5, 0.5]


@pytest.mark.parametrize("name", ["shapes", "shapes_strict"])
def test_a_prompt_of_another_world_fails_at_start(name: str, picture: np.ndarray, make_sample: MakeSample) -> None:
    good, bad = (make_sample(picture, text).prompt for text in ("a red circle", "a red cirle"))
    build(name).validate([good])
    with pytest.raises(ValueError, match=r"'a red cirle' .* did you mean 'a red circle'"):
        build(name).validate([good, bad])


@pytest.mark.parametrize(("half", "count"), [("train", 1576), ("heldout", 400)])
def test_shipped_prompts_are_captions_and_carry_their_task(half: str, count: int) -> None:
    path = Path(__file__).parents[3] / f"assets/prompts/shapes_{half}.jsonl"
    prompts = load_prompts(path, max_chars=2000)
    build("shapes").validate(prompts)
    assert len({prompt.id for prompt in prompts}) == len(prompts) == count
    assert all(prompt.fields["task"] == parse(prompt.text).task for prompt in prompts)
