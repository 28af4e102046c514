"""Rules of thumb on a run's metrics: what deserves a look. docs/reading_a_run.md says what to do about each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megadiff.observe.evaluation import Comparison
from megadiff.observe.hacking import signs
from megadiff.observe.metrics import (
    STAGES,
    Row,
    column,
    config_number,
    finite,
    median,
    metric_keys,
    pretty_number,
    stage_key,
)

RECENT_STEPS = 10
ZERO_STD_RATIO = 0.5
CLIP_FRACTION = 0.3
GRAD_NORM_SPIKE = 10.0  # × the run's median
SYNC_SHARE = 0.3
UNTIMED_SHARE = 0.25

Finding = str
Check = Callable[[Sequence[Row], Mapping[str, Any]], Finding | None]


def _not_finite(rows: Sequence[Row], config: Mapping[str, Any]) -> Finding | None:
    bad = [key for key in metric_keys(rows) if any(key in row and row[key] is None for row in rows)]
    return (
        f"NaN or infinity in {', '.join(bad)}: find the first step of it before trusting what follows."
        if bad
        else None
    )


def _zero_std(rows: Sequence[Row], config: Mapping[str, Any]) -> Finding | None:
    ratio = median(column(rows[-RECENT_STEPS:], "reward/zero_std_ratio"))
    if ratio is None or ratio <= ZERO_STD_RATIO:
        return None
    return f"{ratio:.0%} of the groups have equal rewards and teach nothing: the prompts are too easy or too hard."


def _clipping(rows: Sequence[Row], config: Mapping[str, Any]) -> Finding | None:
    fraction = median(column(rows[-RECENT_STEPS:], "policy/clip_fraction"))
    if fraction is None or fraction <= CLIP_FRACTION:
        return None
    return f"{fraction:.0%} of the ratios are clipped: the policy moves too far per batch; lower optim.lr."


def _parity(rows: Sequence[Row], config: Mapping[str, Any]) -> Finding | None:
    gap = max(finite(column(rows, "parity/log_prob_gap_max")), default=None)
    clip_range = config_number(config, "algorithm", "clip_range")
    recomputed = (
        config.get("algorithm", {}).get("old_log_prob", "rollout") != "rollout"
    )  # auto: at such a gap, it is
    if gap is None or not clip_range or gap < clip_range / 2 or recomputed:
        return None
    return (
        f"The parity gap reached {pretty_number(gap)}, half the clip range is {pretty_number(clip_range / 2)}: trainer "
        "and replica disagree, and clipping acts on that difference."
    )


def _grad_norm(rows: Sequence[Row], config: Mapping[str, Any]) -> Finding | None:
    usual = median(column(rows, "optim/grad_norm"))
    recent = max(finite(column(rows[-RECENT_STEPS:], "optim/grad_norm")), default=None)
    if not usual or recent is None or recent <= GRAD_NORM_SPIKE * usual:
        return None
    return f"The gradient norm jumped to {pretty_number(recent)}; its median is {pretty_number(usual)}."


def _sync_share(rows: Sequence[Row], config: Mapping[str, Any]) -> Finding | None:
    step, sync = median(column(rows, "time/step_s")), median(column(rows, stage_key("sync")))
    if not step or sync is None or sync <= SYNC_SHARE * step:
        return None
    return f"Weight sync takes {sync / step:.0%} of a step: train LoRA, or do more per step."


def _untimed_share(rows: Sequence[Row], config: Mapping[str, Any]) -> Finding | None:
    step = median(column(rows, "time/step_s"))
    stages = [median(column(rows, stage_key(stage))) for stage in STAGES]
    if not step or not finite(stages):
        return None
    untimed = 1 - sum(finite(stages)) / step
    return (
        f"{untimed:.0%} of a step is in no stage (waiting for other ranks, replicas falling asleep)."
        if untimed > UNTIMED_SHARE
        else None
    )


UNTRUSTED: tuple[Check, ...] = (_not_finite, _parity)  # with these, no other number can be trusted
CHECKS: tuple[Check, ...] = (_zero_std, _clipping, _grad_norm, _sync_share, _untimed_share)


def findings(
    rows: Sequence[Row], config: Mapping[str, Any], heldout: Comparison | None = None
) -> list[Finding]:
    """Sentences on what deserves a look, the gravest first; [] when nothing does. Missing metrics are no finding.

    heldout: the last evaluation against the first one."""
    found = [check(rows, config) for check in UNTRUSTED]
    for place, sign in enumerate(signs(rows, config, heldout)):
        found.append(
            sign.claim if place else sign.sentence
        )  # their remedies are much the same: once is enough
    found += [check(rows, config) for check in CHECKS]
    return [finding for finding in found if finding is not None]
