"""Whatever a user's score() returns or raises is its own failure, at once and in its own words."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from megadiff.config.rewards import RewardConfig
from megadiff.rewards.answers import score_checked
from megadiff.rewards.base import Reward, RewardError, RewardSample
from megadiff.rewards.frame import FrameReward
from megadiff.rewards.score import Scorer
from megadiff.types import Prompt, RolloutGroup

MakeGroup = Callable[..., RolloutGroup]


class NoLength(list):
    def __len__(self) -> int:
        raise RuntimeError("no length")


class NoIteration(list):
    def __iter__(self) -> Iterator[float]:
        raise RuntimeError("no iteration")


class NoList:
    def tolist(self) -> list[float]:
        raise RuntimeError("no tolist")


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Answers(Reward):
    """Answers with `value` for every sample, in some form that may fail while it is read."""

    def __init__(self, *, value: float = 0.5, form: str = "list") -> None:
        self.value = value
        self.form = form

    def score(self, samples: Sequence[RewardSample]) -> object:
        if self.form == "str":
            raise Unprintable
        numbers = [self.value] * len(samples)
        answers = {
            "list": numbers,
            "tensor": torch.tensor(numbers),
            "numpy": np.array(numbers),
            "scalars": [torch.tensor(self.value)] * len(samples),
            "nan": [*numbers[1:], float("nan")],
            "inf": [float("inf")] * len(samples),
            "short": numbers[1:],
            "none": None,
            "single": self.value,
            "string": "0" * len(samples),
            "strings": ["0.5"] * len(samples),
            "integer": [10**5000] * len(samples),
            "fraction": [Fraction(10**400, 3)] * len(samples),
            "length": NoLength(numbers),
            "iteration": NoIteration(numbers),
            "tolist": NoList(),
            "bytes": bytes(len(samples)),
        }
        return answers[self.form]


class Raises(Reward):
    """Fails after slow_s seconds, in a batch as well as alone."""

    num_calls = 0

    def __init__(
        self, *, error: str = "ValueError", slow_s: float = 0, samples_per_call: int | None = None
    ) -> None:
        self.error = {"ValueError": ValueError, "SystemExit": SystemExit}[error]
        self.slow_s = slow_s
        self.samples_per_call = samples_per_call

    def score(self, samples: Sequence[RewardSample]) -> list[float]:
        Raises.num_calls += 1
        time.sleep(self.slow_s)
        raise self.error("no such judge")


def config(class_name: str, weight: float = 1.0, **args: object) -> RewardConfig:
    return RewardConfig(type=f"{__name__}:{class_name}", weight=weight, args=args)


def scored(
    groups: Sequence[RolloutGroup], timeout_s: float = 20.0, **configs: RewardConfig
) -> dict[str, torch.Tensor]:
    for each in configs.values():
        each.timeout_s = timeout_s
    with closing(Scorer(configs, num_workers=2)) as scorer:
        return scorer.score(groups)


class ReadsColumn(Reward):
    """Reads a column of the row."""

    def score(self, samples: Sequence[RewardSample]) -> list[float]:
        return [float(sample.prompt.fields["target"]) for sample in samples]


def test_a_column_that_the_row_lacks_is_told_with_those_that_it_has() -> None:
    prompt = Prompt(text="a wall", id="0", fields={"tag": "a", "aim": 1})
    sample = RewardSample(pixels=np.zeros((1, 8, 8, 3), np.uint8), prompt=prompt, sample_index=0)
    with pytest.raises(RewardError) as caught:
        score_checked(ReadsColumn(), [sample])
    assert "KeyError: 'target'; if that is a column, the row has ['aim', 'tag']" in str(
        caught.value
    )
    assert "define validate(prompts)" in str(caught.value)

    # Of a reward within a reward it is told once.
    inner = FrameReward(reward=f"{__name__}:ReadsColumn")
    with pytest.raises(RewardError) as caught:
        score_checked(inner, [sample])
    assert str(caught.value).count("define validate(prompts)") == 1

    full = replace(sample, prompt=replace(prompt, fields={"target": 0.5}))
    assert score_checked(ReadsColumn(), [full]) == [0.5]


@pytest.mark.parametrize("error", ["ValueError", "SystemExit"])
@pytest.mark.parametrize(("chunk", "samples"), [(None, "samples 0, 1, 2, 3"), (1, "sample ")])
def test_a_reward_that_raises_names_itself_prompt_and_samples(
    make_group: MakeGroup,
    caplog: pytest.LogCaptureFixture,
    error: str,
    chunk: int | None,
    samples: str,
) -> None:
    """The user's traceback is logged once, however many calls fail."""
    judge = config("Raises", error=error, samples_per_call=chunk)
    with pytest.raises(RewardError) as caught:
        scored([make_group([1, 2, 3, 4], "a red fox") for _ in range(8)], judge=judge)
    assert f"reward 'judge' on {samples}" in str(caught.value)
    assert f"of prompt 'a red fox' raised {error}: no such judge" in str(caught.value)
    assert type(caught.value.__cause__).__name__ == error
    assert caplog.text.count("Traceback") == 1
    assert 'raise self.error("no such judge")' in caplog.text


def test_no_sample_is_scored_again_to_find_the_one_that_failed(make_group: MakeGroup) -> None:
    Raises.num_calls = 0
    with pytest.raises(RewardError):
        scored([make_group([1] * 16)], judge=config("Raises"))
    assert Raises.num_calls == 1


def test_a_failures_own_text_is_not_replaced_by_the_time_it_took(make_group: MakeGroup) -> None:
    with pytest.raises(RewardError, match="no such judge"):
        scored([make_group([1] * 16)], timeout_s=0.5, judge=config("Raises", slow_s=0.3))


@pytest.mark.parametrize("form", ["tensor", "numpy", "scalars"])
def test_number_like_answers(make_group: MakeGroup, form: str) -> None:
    result = scored([make_group([1, 2])], flat=config("Answers", form=form))
    assert result["flat"].tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ("nan", "sample 1 of prompt 'a red fox' returned nan"),
        ("inf", "sample 0 of prompt 'a red fox' returned inf"),
        ("short", "samples 0, 1 of prompt 'a red fox' returned 1 values for 2 samples"),
        ("none", "returned a NoneType for 2 samples"),
        ("single", "returned a float for 2 samples"),
        ("string", "returned 2 values for 2 samples"),
        ("strings", "returned '0.5'; a reward must be a finite number"),
        ("integer", "returned inf"),
        ("fraction", "returned inf"),
        ("length", "raised RuntimeError: no length"),
        ("iteration", "raised RuntimeError: no iteration"),
        ("tolist", "raised RuntimeError: no tolist"),
        ("str", "<exception str() failed>"),
        ("bytes", "returned 2 values for 2 samples; return a list"),
    ],
)
def test_answers_that_are_not_finite_numbers_fail_at_once(
    make_group: MakeGroup, form: str, words: str
) -> None:
    started = time.monotonic()
    group = make_group([1, 2], "a red fox")
    with pytest.raises(RewardError) as caught:
        scored([group], timeout_s=60.0, judge=config("Answers", form=form))
    assert time.monotonic() - started < 30
    assert "reward 'judge' on sample" in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("value", "weight", "words"),
    [
        (1e39, 1.0, ["'judge'", "sample 0", "'a red fox'", "1e+39", "weight 1", "3.4e+38"]),
        (-1e39, 0.0, ["-1e+39", "3.4e+38"]),
        (1e3, 1e38, ["returned 1000", "weight 1e+38", "1e+41", "lower the weight"]),
    ],
)
def test_values_are_finite_in_float32_after_weighting(
    make_group: MakeGroup, value: float, weight: float, words: list[str]
) -> None:
    with pytest.raises(RewardError) as caught:
        scored([make_group([1, 2], "a red fox")], judge=config("Answers", weight, value=value))
    for word in words:
        assert word in str(caught.value)


def test_the_largest_value_passes(make_group: MakeGroup) -> None:
    judge = config("Answers", -1.0, value=torch.finfo(torch.float32).max)
    assert scored([make_group([1, 2])], judge=judge)["total"].isfinite().all()


def test_the_total_is_finite_in_float32(make_group: MakeGroup) -> None:
    rewards = {"a": config("Answers", 2.0, value=1.5e38), "b": config("Answers", value=1e38)}
    with pytest.raises(RewardError, match=r"sample 0 of prompt 'red' is 2·1.5e\+38 \(a\) \+ 1·1e"):
        scored([make_group([1, 2], "red")], **rewards)
