from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from examples.shapes import reward
from examples.shapes.world import captions, parse, render
from megadiff.config.rewards import RewardConfig
from megadiff.data.prompts import load_prompts, prompt_id
from megadiff.rewards.base import Reward, RewardSample, build_reward
from megadiff.types import Prompt

VERIFY_FRAMES = reward.verify_frames
MakeSample = Callable[..., RewardSample]


def build(name: str) -> Reward:
    return build_reward(name, RewardConfig(type=f"examples.shapes.reward:{name}"))


@pytest.fixture
def picture() -> np.ndarray:
    return render(parse("a red circle left of a blue star"), np.random.default_rng(0))


@pytest.mark.parametrize(
    ("text", "dense", "strict"),
    [
        ("a red circle left of a blue star", 1.0, 1.0),
        ("a circle and a star", 1.0, 1.0),
        (
            "a red circle right of a blue star",
            0.35,
            0.0,
        ),  # both objects: half of what is left without the relation
        ("a red circle and a green star", 0.4, 0.0),
        ("a red circle", 0.25, 0.0),
        ("four cyan triangles", 0.5 * 2 * 0.1 / 4, 0.0),
    ],
)
def test_values(
    text: str, dense: float, strict: float, picture: np.ndarray, make_sample: MakeSample
) -> None:
    sample = make_sample(picture, text)
    assert build("ShapesReward").score([sample]) == pytest.approx([dense])
    assert build("ShapesStrictReward").score([sample]) == [strict]


def test_mean_over_frames(picture: np.ndarray, make_sample: MakeSample) -> None:
    video = make_sample(np.stack([picture, np.zeros_like(picture)]), "a circle and a star")
    assert (
        build("ShapesReward").score([video, video])
        == build("ShapesStrictReward").score([video, video])
        == [0.5, 0.5]
    )


@pytest.mark.parametrize("name", ["ShapesReward", "ShapesStrictReward"])
def test_a_prompt_of_another_world_fails_at_start(
    name: str, picture: np.ndarray, make_sample: MakeSample
) -> None:
    good, bad = (make_sample(picture, text).prompt for text in ("a red circle", "a red cirle"))
    build(name).validate([good])
    with pytest.raises(ValueError, match=r"'a red cirle' .* did you mean 'a red circle'"):
        build(name).validate([good, bad])


@pytest.mark.parametrize(("half", "count"), [("train", 1576), ("heldout", 400)])
def test_shipped_prompts_are_captions_and_carry_their_task(half: str, count: int) -> None:
    path = Path(__file__).parents[3] / f"assets/prompts/shapes_{half}.jsonl"
    prompts = load_prompts(path, max_chars=2000)
    build("ShapesReward").validate(prompts)
    assert len({prompt.id for prompt in prompts}) == len(prompts) == count
    assert all(prompt.fields["task"] == parse(prompt.text).task for prompt in prompts)


@pytest.mark.parametrize("cores", [1, 2])
def test_both_rewards_verify_a_sample_once_in_processes_or_here(monkeypatch, cores):
    """cores: from which number on processes are used; this machine has one at least."""
    monkeypatch.setattr(reward, "LEAST_CORES", cores)
    monkeypatch.setattr(reward, "share_of_cores", lambda most: 1)
    judge = reward.Verdicts()
    monkeypatch.setattr(reward, "VERDICTS", judge)
    calls = []
    monkeypatch.setattr(reward, "verify_frames", _counting(calls)) if cores == 2 else None
    samples = [_sample(caption, index) for index, caption in enumerate(captions()[:40:7])]
    dense = reward.ShapesReward().score(samples)
    assert dense == [1.0] * len(samples) == reward.ShapesStrictReward().score(samples[::-1])
    assert (judge._pool is not None) == (cores == 1)
    assert calls == ([len(samples)] if cores == 2 else [])
    judge.close()


def _counting(calls):
    def verify(pixels, texts):
        calls.append(len(texts))
        return VERIFY_FRAMES(pixels, texts)

    return verify


def _sample(caption, index):
    pixels = render(caption, np.random.default_rng(index))[None]
    prompt = Prompt(text=caption.text, id=prompt_id(caption.text, " "))
    return RewardSample(pixels=pixels, prompt=prompt, sample_index=index)


def test_a_failure_reaches_all_who_wait_and_is_not_kept(monkeypatch):
    monkeypatch.setattr(reward, "share_of_cores", lambda most: 1)
    judge = reward.Verdicts()
    sample = _sample(captions()[0], 0)
    monkeypatch.setattr(reward, "verify_frames", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        judge.of([sample])
    monkeypatch.setattr(reward, "verify_frames", VERIFY_FRAMES)
    assert judge.of([sample])[0][0].strict
