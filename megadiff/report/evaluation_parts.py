"""What the pages show of evaluations: bars of every task, and a wall of samples with their verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from html import escape
from pathlib import Path

from megadiff.observe.evaluation import EvaluatedSample, Evaluation
from megadiff.observe.metrics import pretty_number
from megadiff.report.charts import Axis, Bar, bar_chart
from megadiff.report.evaluation_table import groups, value_text
from megadiff.report.pictures import Picture, frame, load_pictures

MARKS = {1: ("good", "✓", "right"), 0: ("bad", "✗", "wrong")}  # verdict → class, sign, word


def task_chart(
    shown: Sequence[Evaluation], reward: str, *, series: Sequence[str], note: str = ""
) -> str:
    """Mean and interval of a reward over all samples and by task; series: what to call each of the evaluations."""
    is_share = all(each.is_share(reward) for each in shown if reward in each.reward_names)
    return bar_chart(
        [(name, [_bar(each, reward, task) for each in shown]) for name, task in groups(shown[-1])],
        series=series,
        title=reward,
        key=f"eval/{reward}",
        note=note,
        axis=Axis(low=0.0, high=1.0) if is_share else None,
        text=partial(value_text, is_share=is_share),
        tick_text="{:.0%}".format if is_share else pretty_number,
    )


def _bar(evaluation: Evaluation, reward: str, task: str | None) -> Bar | None:
    if reward not in evaluation.reward_names:
        return None
    found = evaluation.estimate(reward, task)
    return Bar(value=found.mean, low=found.low, high=found.high)


def leading_reward(evaluation: Evaluation) -> str:
    """The first reward that is only 0 or 1, an accuracy; the first of all without one."""
    names = evaluation.reward_names
    return next((name for name in names if evaluation.is_share(name)), names[0])


def wall(shown: Sequence[Evaluation], folders: Sequence[Path], *, series: Sequence[str]) -> str:
    """The pictured samples, by task, each as every evaluation drew it, side by side; "" without an image.

    shown: evaluations that drew the same samples, their folders, and what to call them.
    """
    reward = leading_reward(shown[-1])
    is_share = all(each.is_share(reward) for each in shown)
    by_identity = [{sample.identity: sample for sample in each.samples} for each in shown]
    order = {task: place for place, task in enumerate(shown[-1].tasks)}
    pictured = (sample for sample in shown[-1].samples if sample.file)
    chosen = sorted(pictured, key=lambda sample: order.get(sample.task, -1))
    columns = [[samples[sample.identity] for samples in by_identity] for sample in chosen]
    pictures = load_pictures(
        [
            folder / s.file
            for column in columns
            for s, folder in zip(column, folders, strict=True)
            if s.file
        ]
    )
    if not pictures:
        return ""
    cells = ""
    for column in columns:
        looks = [
            _look(sample, pictures.get(folder / sample.file) if sample.file else None, name=name)
            + f"<p>{mark(sample.rewards[reward], is_share=is_share)}</p>"
            for sample, folder, name in zip(column, folders, series, strict=True)
        ]
        cells += _cell(column[-1], looks)
    return f'<div class="card"><ol class="wall n{len(shown)}">{cells}</ol></div>'


def _look(sample: EvaluatedSample, picture: Picture | None, *, name: str) -> str:
    if picture is None:
        return '<div class="gap"></div>'
    label = f"{sample.caption}, {name}" if name else sample.caption
    rewards = " · ".join(
        f"{reward} {pretty_number(value)}" for reward, value in sample.rewards.items()
    )
    return frame(picture, title=f"{label}: {rewards}", alt=label)


def _cell(sample: EvaluatedSample, looks: Sequence[str]) -> str:
    pair = "".join(f"<div>{look}</div>" for look in looks)
    task = f'<p class="task">{escape(sample.task)}</p>' if sample.task else ""
    return f'<li><div class="pair">{pair}</div><p class="caption">{escape(sample.caption)}</p>{task}</li>'


def mark(value: float, *, is_share: bool) -> str:
    """A verdict, 0 or 1, as a sign and a word; any other reward as its value."""
    if not is_share:
        return f"<b>{pretty_number(value)}</b>"
    kind, sign, word = MARKS[value]
    return f'<b class="{kind}"><span aria-hidden="true">{sign}</span> {word}</b>'
