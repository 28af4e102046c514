"""Turn the answer of a user's score() into floats, and whatever it raises into a RewardError."""

from __future__ import annotations

import math
import numbers
import reprlib
import traceback
from collections.abc import Sequence

import torch
from torch import Tensor

from megadiff.rewards.base import Reward, RewardError, RewardSample

# Scores are float32 tensors, where a larger number would be infinite.
FLOAT32_MAX = torch.finfo(torch.float32).max


class WrongAnswer(RewardError):
    """score() did not return a finite number or None for each sample. That is always a bug."""


def score_checked(
    reward: Reward, samples: Sequence[RewardSample], *, weight: float = 1.0
) -> list[float]:
    """Return reward.score(samples) as one float a sample, finite in float32 also times weight.

    NaN where the reward answered None. Raises WrongAnswer, and RewardError, whose __cause__ is what
    the user's code raised, in score() or while the answer was read. Both name reward, prompt and
    sample.
    """
    try:
        return _floats(samples, reward.score(samples), weight)
    except WrongAnswer as error:
        raise WrongAnswer(f"reward {reward.name!r} on {error}") from None
    except BaseException as error:  # even SystemExit must reach the loop, or the run waits for ever
        reason = "".join(traceback.format_exception_only(error)).strip()
        who = f"reward {reward.name!r} on {samples_text(samples)}"
        # Of a reward within a reward it is what the inner one raised.
        cause = error.__cause__ if isinstance(error, RewardError) and error.__cause__ else error
        # The inner one has the advice already.
        advice = "" if isinstance(error, RewardError) else _column_advice(cause, samples)
        raise RewardError(f"{who} raised {reason}{advice}") from cause


def _column_advice(cause: BaseException, samples: Sequence[RewardSample]) -> str:
    """Return what to do where score() may have asked a row for a column it lacks, else ""."""
    if not isinstance(cause, KeyError) or not cause.args or not isinstance(cause.args[0], str):
        return ""
    for sample in samples:
        if cause.args[0] not in sample.prompt.fields:
            columns = sorted(sample.prompt.fields)
            return (
                f"; if that is a column, the row has {columns}; define validate(prompts) to refuse "
                "such rows before the run starts"
            )
    return ""


def _floats(samples: Sequence[RewardSample], answer: object, weight: float) -> list[float]:
    """Read the answer. Raises WrongAnswer, or what the answer itself raises: it is user code."""
    # Arrays and tensors, on any device, become lists of Python numbers.
    answer = answer.tolist() if hasattr(answer, "tolist") else answer

    if (
        not isinstance(answer, Sequence)
        or isinstance(answer, (str, bytes))
        or len(answer) != len(samples)
    ):
        kind = f"a {type(answer).__name__}"
        count = f"{len(answer)} values" if hasattr(answer, "__len__") else kind
        raise WrongAnswer(
            f"{samples_text(samples)} returned {count} for {len(samples)} samples; "
            "return a list of one number each"
        )

    return [
        _checked_float(sample, value, weight) for sample, value in zip(samples, answer, strict=True)
    ]


def _checked_float(sample: RewardSample, value: object, weight: float) -> float:
    if value is None:
        return math.nan
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()

    if not isinstance(value, numbers.Real):
        raise WrongAnswer(
            f"{samples_text([sample])} returned {reprlib.repr(value)}; "
            "a reward must be a finite number, or None where the sample could not be scored"
        )

    try:
        number = float(value)
    except OverflowError:  # an integer or a fraction beyond float64
        number = math.inf

    weighted = weight * number
    # `not <=` and not `>`: NaN compares false either way.
    if not max(abs(number), abs(weighted)) <= FLOAT32_MAX:
        raise WrongAnswer(
            f"{samples_text([sample])} returned {number:g}, times weight {weight:g} {weighted:g}; "
            f"both must be finite numbers within float32's ±{FLOAT32_MAX:.2g}: "
            "return smaller ones, or lower the weight"
        )
    return number


def samples_text(samples: Sequence[RewardSample]) -> str:
    """Name the samples of one prompt in an error."""
    indices = ", ".join(str(sample.sample_index) for sample in samples)
    plural = "" if len(samples) == 1 else "s"
    return f"sample{plural} {indices} of prompt {samples[0].prompt.text[:200]!r}"
