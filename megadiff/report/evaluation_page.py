"""An evaluation as one HTML page: the figures with their intervals, by task, and samples to look at; against a baseline
where there is one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from html import escape
from pathlib import Path

from megadiff.observe.evaluation import Comparison, Evaluation
from megadiff.observe.metrics import pretty_number
from megadiff.report.evaluation_parts import leading_reward, task_chart, wall
from megadiff.report.evaluation_table import (
    DIVERSITY,
    diversity_rows,
    gain_text,
    groups,
    interval_text,
    settings_text,
    value_text,
)
from megadiff.report.page import render_page, section, tile, write_page

PAGE_NAME = "page.html"
SERIES = ("baseline", "now")
DIVERSITY_LEAD = (
    "Means over prompts. Entropy and spread that fall say that samples of one prompt grow alike, saturation that rises "
    "that they grow lurid."
)


def write_evaluation_page(
    folder: Path,
    evaluation: Evaluation,
    comparison: Comparison | None = None,
    *,
    baseline_folder: Path | None = None,
) -> Path:
    """Writes page.html beside the evaluation's record, aside and renamed, and returns its path. baseline_folder: of the
    comparison's baseline, whose images are shown beside the evaluation's."""
    return write_page(
        folder / PAGE_NAME, render(folder, evaluation, comparison, baseline_folder=baseline_folder)
    )


def render(
    folder: Path,
    evaluation: Evaluation,
    comparison: Comparison | None = None,
    *,
    baseline_folder: Path | None = None,
) -> str:
    """The page's HTML."""
    shown = [comparison.baseline, evaluation] if comparison else [evaluation]
    folders = [baseline_folder or folder, folder] if comparison else [folder]
    series = SERIES[-len(shown) :]
    lead = "Mean of each task with its 95 % interval."
    if comparison:
        lead += " Baseline and evaluation drew from the same noise."
    charts = "".join(task_chart(shown, name, series=series) for name in evaluation.reward_names)
    sections = [
        section("By task", charts, lead=lead),
        _difference_section(comparison) if comparison else "",
        section("Diversity", _table(diversity_rows(evaluation, comparison)), lead=DIVERSITY_LEAD),
        _samples_section(shown, folders),
    ]
    return render_page(
        kind="evaluation",
        name=evaluation.model,
        state=settings_text(evaluation),
        headline=headline(evaluation, comparison).replace(" %", "\N{NO-BREAK SPACE}%"),
        tiles=_tiles(evaluation),
        sections=sections,
    )


def headline(evaluation: Evaluation, comparison: Comparison | None = None) -> str:
    """The leading reward in one sentence; a change is said to be one only where its interval excludes 0."""
    reward = leading_reward(evaluation)
    text = partial(value_text, is_share=evaluation.is_share(reward))
    found = evaluation.estimate(reward)
    if comparison is None or reward not in comparison.reward_names:
        return f"{reward}: {text(found.mean)}."
    before, gain = comparison.baseline.estimate(reward), comparison.difference(reward)
    change = f"from {text(before.mean)} to {text(found.mean)}"
    if gain.low is None or gain.high is None or gain.low <= 0 <= gain.high:
        return f"{reward} went {change}: no clear difference."
    return f"{reward} {'rose' if gain.mean > 0 else 'fell'} {change}."


def _tiles(evaluation: Evaluation) -> list[str]:
    tiles = []
    for reward in evaluation.reward_names[:3]:
        is_share, found = evaluation.is_share(reward), evaluation.estimate(reward)
        interval = f"95 %: {interval_text(found, is_share=is_share)}"
        tiles.append(tile(reward, value_text(found.mean, is_share=is_share), interval))
    tiles.append(
        tile("Samples", str(len(evaluation.samples)), f"of {evaluation.num_prompts} prompts")
    )
    known = {name: evaluation.diversity.get(name) for name in DIVERSITY}
    return tiles + [
        tile(DIVERSITY[name], pretty_number(value))
        for name, value in known.items()
        if value is not None
    ]


def _difference_section(comparison: Comparison) -> str:
    rows = [["", "change", "95 % interval", "won", "lost", "tied", "samples"]]
    for reward in comparison.reward_names:
        is_share = comparison.evaluation.is_share(reward)
        for name, task in groups(comparison.evaluation):
            found = comparison.difference(reward, task)
            interval = interval_text(found, is_share=is_share, is_gain=True)
            shares = [
                value_text(share, is_share=True) for share in (found.won, found.lost, found.tied)
            ]
            gain = gain_text(found.mean, is_share=is_share) + (" points" if is_share else "")
            rows.append([f"{reward}, {name}", gain, interval, *shares, str(found.n)])
    lead = f"Sample by sample against {comparison.baseline.model}: what it won, lost and left as it was."
    return section("Difference", _table(rows), lead=lead)


def _table(rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in rows[0])
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in row[1:])}</tr>'
        for row in rows[1:]
    )
    return f'<div class="card figures"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _samples_section(shown: Sequence[Evaluation], folders: Sequence[Path]) -> str:
    """The wall of samples; nothing without an image."""
    found = wall(shown, folders, series=SERIES if len(shown) > 1 else [""])
    lead = "The same prompts and noise at every evaluation."
    lead += " Left the baseline, right now." if len(shown) > 1 else ""
    return section("Samples", found, lead=lead) if found else ""
