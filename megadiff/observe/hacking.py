"""Find signs that a policy exploits its reward instead of learning what is wanted.

Samples grow alike, lurid or blank, or held-out scores do not follow. A sign is a reason to look at
samples, no proof. docs/reading_a_run.md says what to do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import fmean, variance
from typing import Any, NamedTuple

from megadiff.observe.evaluation import Comparison
from megadiff.observe.metrics import (
    DIVERSITY,
    Rows,
    Verdict,
    column,
    config_number,
    metric_keys,
    pretty_number,
    reward_weights,
    step_of,
    verdict,
    wanted,
)

# Steps averaged at each end of a run: prompts differ from step to step, and diversity with them.
MIN_STEPS = 8
MAX_STEPS = 20
# Standard errors of the difference. The question is asked at every step, so chance must be rare.
CLEAR = 4.0
# Of the start. Measured on shapes: 0.66 in a mild run, 0.04 in a collapsed one.
NARROW = 0.6
COLLAPSED = 0.3
MILD = 1  # gravity of what training does to some degree anyway
FOLLOWS = 1 / 3  # of the gain in training, at least, is expected of a held-out score
# A score that is only watched, such as a file's size, moves a little with every style, and pairs of
# the same noise show even that.
LEAST_FALL = 0.05
UNKNOWN_NOISE = 0.1  # of a held-out score, where only its mean is known
NOT_SCORES = {f"eval/{name}" for name in DIVERSITY}


@dataclass(frozen=True, kw_only=True)
class Sign:
    """A reason to look at samples.

    kind: short name, the same while the sign lasts. gravity: the greater, the more urgent.
    claim: what is seen, remedy: what to do about it, for people. signs() fills in the remedy.
    """

    kind: str
    gravity: int
    claim: str
    remedy: str = ""

    @property
    def sentence(self) -> str:
        return f"{self.claim} {self.remedy}"


@dataclass(frozen=True, kw_only=True)
class Change:
    """A figure at both ends of a run. low, high: bounds on last − first, about 95 % or more."""

    first: float
    last: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"from {pretty_number(self.first)} to {pretty_number(self.last)}"


class Fall(NamedTuple):
    """A figure of diversity that may fall. least: at the start; below, there is nothing to lose."""

    key: str
    what: str
    unit: str
    least: float


class Shift(NamedTuple):
    """A figure of looks that may move: by this much, and to this many times its start.

    times: above 1 for a rise, below 1 for a fall.
    """

    key: str
    what: str
    by: float
    times: float


FALLS = {
    "colours": Fall(
        key="diversity/colour_entropy_bit",
        what="the colours of one prompt's samples",
        unit=" bit",
        least=0.2,
    ),
    "spread": Fall(
        key="diversity/pixel_spread",
        what="the distance between one prompt's samples",
        unit="",
        least=0.02,
    ),
    "motion": Fall(key="diversity/motion", what="the motion within videos", unit="", least=0.005),
}
# UniRL issue 407, of a reward for legible text alone: dark pixels from 0.45 to 0.93, edges down by
# 60 %, while the text score stayed fine.
SHIFTS = {
    "saturation": Shift(
        key="diversity/saturation", what="the saturation of the samples", by=0.15, times=1.3
    ),
    "clipping": Shift(
        key="diversity/clipped_share", what="the share of clipped colour values", by=0.1, times=1.5
    ),
    "blank": Shift(
        key="diversity/blank_share", what="the share of blank background", by=0.25, times=1.3
    ),
    "edges": Shift(key="diversity/edges", what="the edges in the samples", by=0.005, times=0.5),
    "dark": Shift(
        key="diversity/brightness", what="the brightness of the samples", by=0.15, times=0.6
    ),
    "bright": Shift(
        key="diversity/brightness", what="the brightness of the samples", by=0.2, times=1.4
    ),
}


def signs(rows: Rows, config: Mapping[str, Any], heldout: Comparison | None = None) -> list[Sign]:
    """Return the signs of an exploited reward, the gravest first.

    There are none while the reward has no clear gain.
    heldout: the last evaluation against the first one, which tells how noisy its scores are.
    """
    ends = verdict(rows)
    # Without a gain there is nothing that an exploit could have brought.
    if ends is None or not _is_clear_gain(ends):
        return []

    coef = config_number(config, "algorithm", "kl_coef")
    kl = "set algorithm.kl_coef, e.g. to 0.3"
    if coef:
        kl = f"raise algorithm.kl_coef (now {pretty_number(coef)})"
    mild_remedy = f"If samples grow alike, {kl}."
    remedy = f"Look at the samples; {kl}, or go back to an earlier checkpoint."

    gravest_first = sorted(
        [*_falls(rows, ends), *_shifts(rows, ends), *_lags(rows, reward_weights(config), heldout)],
        key=lambda sign: -sign.gravity,
    )
    return [
        replace(sign, remedy=mild_remedy if sign.gravity == MILD else remedy)
        for sign in gravest_first
    ]


def _is_clear_gain(ends: Verdict) -> bool:
    return ends.is_clear and ends.gain > 0


def _falls(rows: Rows, ends: Verdict) -> Iterator[Sign]:
    for name, fall in FALLS.items():
        change = _change(rows, fall.key)
        if (
            change is None
            or change.first < fall.least
            or change.high >= 0
            or change.last >= NARROW * change.first
        ):
            continue

        subject = f"{_while(ends)} {fall.what}"
        # Some narrowing is what training does; only a collapse is called an exploit.
        if change.last < COLLAPSED * change.first:
            claim = f"{subject} fell {change}{fall.unit}: the policy may be exploiting the reward."
            yield Sign(kind=f"{name} collapse", gravity=4, claim=claim)
        else:
            claim = f"{subject} narrowed {change}{fall.unit}. Some of that is usual."
            yield Sign(kind=f"{name} narrow", gravity=MILD, claim=claim)


def _shifts(rows: Rows, ends: Verdict) -> Iterator[Sign]:
    for name, shift in SHIFTS.items():
        change = _change(rows, shift.key)
        if change is None:
            continue

        limits = (change.first + shift.by, change.first * shift.times)
        verb = "rose"
        is_far = change.low > 0 and change.last >= max(limits)
        if shift.times < 1:
            limits = (change.first - shift.by, change.first * shift.times)
            verb = "fell"
            is_far = change.high < 0 and change.last <= min(limits)
        if not is_far:
            continue

        claim = f"{_while(ends)} {shift.what} {verb} {change}"
        claim += ", as it does when a policy exploits its reward."
        yield Sign(kind=name, gravity=2, claim=claim)


def _lags(rows: Rows, weights: Mapping[str, float], heldout: Comparison | None) -> Iterator[Sign]:
    """Yield held-out scores that lag behind what training gained up to the last evaluation."""
    last_evaluated = -1
    for row in rows:
        if any(key.startswith("eval/") for key in row):
            last_evaluated = step_of(row)

    # Later gains are of steps that no held-out score could follow yet.
    rows = [row for row in rows if step_of(row) <= last_evaluated]
    ends = verdict(rows)
    if ends is None or not _is_clear_gain(ends):
        return

    for name, change in _scores(rows, heldout).items():
        claim = f"{_while(ends)} the held-out score {name}"
        wants = wanted(weights, name)
        most = max(wants * change.low, wants * change.high)  # that the score may have gained
        loss = wants * (change.first - change.last)
        if most < 0 and loss >= LEAST_FALL * abs(change.first):
            verb = "fell" if wants > 0 else "(of a weight below 0) rose"
            claim += f" {verb} {change}: the policy is likely to exploit the reward."
            yield Sign(kind=f"{name} falls", gravity=5, claim=claim)
            continue

        trained = verdict(rows, key=f"reward/{name}")
        scores = (ends.first, ends.last, change.first, change.last)
        # A score that is not trained should follow the total, where both are of one scale.
        if trained is None and wants > 0 and all(0 <= score <= 1 for score in scores):
            trained = ends

        if trained and trained.is_clear and most < FOLLOWS * wants * trained.gain:
            values = f"({pretty_number(change.first)}, then {pretty_number(change.last)})"
            claim += f" did not follow {values}: the policy may be exploiting the reward, or "
            claim += "learning prompts by heart."
            yield Sign(kind=f"{name} lags", gravity=3, claim=claim)


def _scores(rows: Rows, heldout: Comparison | None) -> dict[str, Change]:
    """Return held-out score → its change from the first evaluation to the last."""
    if heldout is not None:
        changes = {name: _paired_change(heldout, name) for name in heldout.reward_names}
    else:
        keys = [k for k in metric_keys(rows) if k.startswith("eval/") and k not in NOT_SCORES]
        # The mean is made of the others: it would only repeat what they say.
        keys = [key for key in keys if key != "eval/mean"] or keys
        changes = {key.removeprefix("eval/"): _evaluated_change(rows, key) for key in keys}
    return {name: change for name, change in changes.items() if change is not None}


def _paired_change(heldout: Comparison, name: str) -> Change | None:
    difference = heldout.difference(name)
    if difference.low is None or difference.high is None:
        return None
    first = heldout.baseline.estimate(name).mean
    last = heldout.evaluation.estimate(name).mean
    return Change(first=first, last=last, low=difference.low, high=difference.high)


def _evaluated_change(rows: Rows, key: str) -> Change | None:
    """Compare first and last evaluation, give or take UNKNOWN_NOISE; None with fewer than two."""
    values = column(rows, key)
    if len(values) < 2:
        return None
    # Relative to the larger: a score near 0 would get no slack of its own.
    slack = UNKNOWN_NOISE * max(abs(values[0]), abs(values[-1]))
    return _uncertain(values[0], values[-1], slack)


def _change(rows: Rows, key: str) -> Change | None:
    """Compare the first and last steps, ± CLEAR standard errors; None for too few steps."""
    values = column(rows, key)
    window = min(MAX_STEPS, len(values) // 2)
    if window < MIN_STEPS:
        return None
    start = values[:window]
    end = values[-window:]
    slack = CLEAR * math.sqrt((variance(start) + variance(end)) / window)
    return _uncertain(fmean(start), fmean(end), slack)


def _uncertain(first: float, last: float, slack: float) -> Change:
    return Change(first=first, last=last, low=last - first - slack, high=last - first + slack)


def _while(ends: Verdict) -> str:
    return f"Reward rose by {pretty_number(ends.gain)} while"
