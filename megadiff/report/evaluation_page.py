"""Write an evaluation as one HTML page; a run's report takes its parts for held-out prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from megadiff.observe.evaluation import Comparison, Evaluation
from megadiff.observe.metrics import pretty_number
from megadiff.report.charts import Drawing, bar_chart
from megadiff.report.evaluation_table import (
    DIFFERENCE_HEAD,
    DIVERSITY,
    RewardFormat,
    difference_cells,
    diversity_rows,
    groups,
    reward_format,
    settings_text,
)
from megadiff.report.page import Section, Tile, change_sentence, write_page
from megadiff.report.pictures import load_pictures, rewards_text

PAGE_NAME = "page.html"
MAX_TILES = 3  # of rewards; with more, the others would begin a second row
DIVERSITY_LEAD = (
    "Means over prompts. Entropy and spread that fall say that samples of one prompt grow alike, "
    "saturation that rises that they grow lurid."
)
Evaluations = Sequence[tuple[Path, Evaluation]]  # with their folders
Weights = Mapping[str, float]  # of rewards in training; 1 for a reward that is not in it
ALL_ALIKE: Weights = MappingProxyType({})


def write_evaluation_page(
    folder: Path,
    evaluation: Evaluation,
    comparison: Comparison | None = None,
    *,
    baseline_folder: Path | None = None,
) -> Path:
    """Write page.html beside the evaluation's record and return its path.

    baseline_folder: of the comparison's baseline, whose images stand beside the evaluation's.
    """
    evaluations = [(folder, evaluation)]
    lead = "Mean of each task with its 95 % interval."
    samples_lead = "The same prompts and noise at every evaluation."
    if comparison:
        evaluations.insert(0, (baseline_folder or folder, comparison.baseline))
        lead += " Baseline and evaluation drew from the same noise."
        samples_lead += " Left the baseline, right now."

    names = ["baseline", "now"] if comparison else [""]
    bars = [task_chart(evaluations, reward, names) for reward in evaluation.reward_names]
    sections = [Section(title="By task", lead=lead, bars=bars)]
    if comparison:
        sections.append(_difference_section(comparison))

    figures = diversity_rows(evaluation, comparison)
    sections += [
        Section(title="Diversity", lead=DIVERSITY_LEAD, table=figures),
        Section(title="Samples", lead=samples_lead, wall=wall(evaluations, names)),
    ]

    return write_page(
        folder / PAGE_NAME,
        kind="evaluation",
        name=evaluation.model,
        state=settings_text(evaluation),
        # So that no line breaks between a number and its percent sign.
        headline=headline(evaluation, comparison).replace(" %", "\N{NO-BREAK SPACE}%"),
        tiles=_tiles(evaluation),
        answers=(),
        sections=sections,
    )


def headline(evaluation: Evaluation, comparison: Comparison | None = None) -> str:
    """Say in one sentence what the leading reward is, or how it changed."""
    reward = leading_reward(evaluation)
    if comparison and reward in comparison.reward_names:
        return reward_sentence(comparison, reward, reward, unclear="no clear difference")
    form = RewardFormat(evaluation.is_share(reward))
    return f"{reward}: {form.value(evaluation.estimate(reward).mean)}."


def reward_sentence(comparison: Comparison, reward: str, subject: str, **words: str) -> str:
    """Say what a reward did, and whether that is clear."""
    form = RewardFormat(comparison.is_share(reward))
    first = form.value(comparison.baseline.estimate(reward).mean)
    last = form.value(comparison.evaluation.estimate(reward).mean)
    gain = comparison.difference(reward)
    if gain.excludes_zero and not gain.is_clear:
        words = {"unclear": "too few samples changed to tell"}
    return change_sentence(subject, first, last, gain=gain.mean, is_clear=gain.is_clear, **words)


def leading_reward(evaluation: Evaluation, weights: Weights = ALL_ALIKE) -> str:
    """Return the reward that is told first: a trained one before those of weight 0.

    Among them one that is only 0 or 1, an accuracy. Of several it is that with the largest weight,
    and of equal weights the first.
    """
    names = evaluation.reward_names
    # one that no held-out prompt asks for tells nothing
    names = [name for name in names if evaluation.estimate(name).n] or names
    names = [name for name in names if weights.get(name, 1.0)] or names
    names = [name for name in names if evaluation.is_share(name)] or names
    # A weight below 0 trains as hard. max() takes the first of equal ones.
    return max(names, key=lambda name: abs(weights.get(name, 1.0)))


def _tiles(evaluation: Evaluation) -> list[Tile]:
    tiles = []
    for reward in evaluation.reward_names[:MAX_TILES]:
        form = RewardFormat(evaluation.is_share(reward))
        mean = evaluation.estimate(reward)
        tiles.append((reward, form.value(mean.mean), f"95 %: {form.interval(mean)}"))

    tiles.append(("Samples", str(len(evaluation.samples)), f"of {evaluation.num_prompts} prompts"))
    for name, label in DIVERSITY.items():
        value = evaluation.diversity.get(name)
        if value is not None:
            tiles.append((label, pretty_number(value), ""))

    return tiles


def _difference_section(comparison: Comparison) -> Section:
    rows = [["", "change", *DIFFERENCE_HEAD]]
    for reward in comparison.reward_names:
        # Percentage points: 10 % more of 50 % would be 55 %.
        unit = " points" if comparison.is_share(reward) else ""
        for name, task in groups(comparison.evaluation):
            gain, *cells = difference_cells(comparison, reward, task)
            rows.append([f"{reward}, {name}", gain + unit, *cells])
    model = comparison.baseline.model
    lead = f"Sample by sample against {model}: what it won, lost and left as it was."
    return Section(title="Difference", lead=lead, table=rows)


def task_chart(evaluations: Evaluations, reward: str, names: Sequence[str]) -> Drawing:
    """Return bars of a reward over all samples and by task. names: of the evaluations."""
    records = [evaluation for _, evaluation in evaluations]
    # One format for all: 0.5 beside 50 % could not be compared.
    form = reward_format(records, reward)

    rows = {}
    for name, task in groups(records[-1]):
        rows[name] = [
            record.estimate(reward, task) if reward in record.reward_names else None
            for record in records
        ]

    return bar_chart(
        rows,
        series=names,
        title=reward,
        key=f"eval/{reward}",
        is_share=form.is_share,
        text=form.value,
    )


def wall(
    evaluations: Evaluations,
    names: Sequence[str],
    *,
    title: str = "",
    lead: str = "",
    weights: Weights = ALL_ALIKE,
) -> Drawing | None:
    """Return the pictured samples by task, each as every evaluation drew it; None without an image.

    evaluations drew the same samples; names: how to call them. weights: of rewards.
    """
    last = evaluations[-1][1]
    reward = leading_reward(last, weights)
    is_share = reward_format([record for _, record in evaluations], reward).is_share

    # Tasks in the order of the prompt file; samples without one come first.
    order = ["", *last.tasks]
    pictured = [sample for sample in last.samples if sample.file]
    pictured.sort(key=lambda sample: order.index(sample.task))

    columns = []
    files = []

    for (folder, record), name in zip(evaluations, names, strict=True):
        samples = record.by_identity
        columns.append((folder, samples, name))
        files += [folder / file for s in pictured if (file := samples[s.identity].file)]

    # All at once: together they have to be small enough for one page.
    pictures = load_pictures(files)

    cells = []
    for sample in pictured:
        looks = []
        for folder, samples, name in columns:
            drawn = samples[sample.identity]
            alt = f"{drawn.caption}, {name}" if name else drawn.caption
            value = drawn.rewards.get(reward)  # a run may get another reward when it resumes
            look = {
                "picture": pictures.get(folder / drawn.file) if drawn.file else None,
                "alt": alt,
                "title": f"{alt}: {rewards_text(drawn.rewards)}",
                "value": value,
                "is_right": value == 1 if is_share and value is not None else None,
            }
            looks.append(look)
        cells.append({"looks": looks, "caption": sample.caption, "task": sample.task})

    lead = f"{lead} Under each picture stands its {reward}.".strip()
    parts = {"title": title, "lead": lead, "num_looks": len(columns), "cells": cells}
    return parts if pictures else None
