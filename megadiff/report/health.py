"""Apply rules of thumb to a run's metrics; docs/reading_a_run.md says what to do about each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megadiff.algorithms import ALGORITHMS
from megadiff.config.algorithm import AlgorithmConfig, half_clip_range
from megadiff.observe.evaluation import Comparison
from megadiff.observe.hacking import Sign, signs
from megadiff.observe.metrics import (
    STAGES,
    Rows,
    column,
    config_number,
    finite,
    median,
    pretty_number,
    stage_key,
)

RECENT_STEPS = 10
# Metric → the share beyond which it is a finding, and what is said then.
LIMITS = {
    "reward/zero_std_ratio": (
        0.5,
        "of the groups have equal rewards and teach nothing: the prompts are too easy or too hard.",
    ),
    "policy/clip_fraction": (
        0.3,
        "of the ratios are clipped: the policy moves too far per batch; lower optim.lr.",
    ),
}
GRAD_NORM_SPIKE = 10.0  # × the run's median
SYNC_SHARE = 0.3  # of a step
UNTIMED_SHARE = 0.25  # of a step


def findings(rows: Rows, config: Mapping[str, Any], heldout: Comparison | None) -> list[str]:
    """Return sentences on what deserves a look, the gravest first. Missing metrics are no finding.

    heldout: the last evaluation against the first one.
    """
    hacking = sign_sentences(signs(rows, config, heldout))
    return [*untrusted_sentences(rows, config), *hacking, *unsound_sentences(rows)]


def sign_sentences(hacking: Sequence[Sign]) -> list[str]:
    """Return a sentence a sign. Their remedies are much the same: the first has one."""
    return [sign.claim if number else sign.sentence for number, sign in enumerate(hacking)]


def untrusted_sentences(rows: Rows, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the findings with which no other number can be trusted. No metric is no finding."""
    # Rows hold None where a number was not finite; a metric that was not logged is not in them.
    bad = sorted({key for row in rows for key, value in row.items() if value is None})
    if bad:
        yield (
            f"NaN or infinity in {', '.join(bad)}: find the first step of it before trusting what "
            "follows."
        )

    gap = max(column(rows, "parity/log_prob_gap_max"), default=0.0)
    # With `auto`, log-probs are the trainer's wherever the gap is that large.
    is_recomputed = config.get("algorithm", {}).get("old_log_prob", "rollout") != "rollout"
    name = config.get("algorithm", {}).get("name", "flow_grpo")
    settings = AlgorithmConfig(
        name=name,
        clip_range=config_number(config, "algorithm", "clip_range") or 0.0,
        clip_range_high=config_number(config, "algorithm", "clip_range_high") or 0.0,
    )
    half = half_clip_range(settings)
    build = ALGORITHMS.get(name)
    compares = build is None or build(settings).compares_rollout
    if compares and half and gap >= half and not is_recomputed:
        yield (
            f"The parity gap reached {pretty_number(gap)}, half the clip range is "
            f"{pretty_number(half)}: trainer and replica disagree, and clipping acts on "
            "that difference."
        )


def unsound_sentences(rows: Rows) -> Iterator[str]:
    """Yield what is wrong with the updates, then what takes too much of a step."""
    recent = rows[-RECENT_STEPS:]

    for key, (limit, sentence) in LIMITS.items():
        # Medians, here and below: a single odd step is no finding.
        typical = median(column(recent, key)) or 0.0
        if typical > limit:
            yield f"{typical:.0%} {sentence}"

    usual = median(column(rows, "optim/grad_norm"))
    highest = max(column(recent, "optim/grad_norm"), default=0.0)
    if usual and highest > GRAD_NORM_SPIKE * usual:
        yield (
            f"The gradient norm jumped to {pretty_number(highest)}; its median is "
            f"{pretty_number(usual)}."
        )
    yield from _slow(rows)


def _slow(rows: Rows) -> Iterator[str]:
    """Yield what takes too much of a step."""
    step = median(column(rows, "time/step_s"))
    if not step:
        return

    stages = {stage: median(column(rows, stage_key(stage))) for stage in STAGES}
    sync = (stages["sync"] or 0.0) / step
    if sync > SYNC_SHARE:
        yield f"Weight sync takes {sync:.0%} of a step: train LoRA, or do more per step."

    timed = finite(stages.values())
    untimed = 1 - sum(timed) / step
    if timed and untimed > UNTIMED_SHARE:
        yield (
            f"{untimed:.0%} of a step is in no stage (waiting for other ranks, replicas falling "
            "asleep)."
        )
