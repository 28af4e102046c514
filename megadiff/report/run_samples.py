"""The report's section of samples: the same prompt over time, one row a prompt."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from megadiff.observe.metrics import pretty_number
from megadiff.observe.samples import SavedSample
from megadiff.report.pictures import Picture, frame, load_pictures

MAX_PROMPTS = 8
MAX_COLUMNS = 10


def evenly_spaced(items: Sequence[int], count: int) -> list[int]:
    """At most `count` of the items, the first and the last among them."""
    if len(items) <= count:
        return list(items)
    return [items[round(index * (len(items) - 1) / (count - 1))] for index in range(count)]


def pick_rows(samples: Sequence[SavedSample]) -> list[list[SavedSample | None]]:
    """The prompts seen at the most steps, each with evenly spaced steps and the lowest sample index of each step.

    Where all rows together need few enough steps, columns are steps and None marks a step without that prompt;
    otherwise each row has its own steps.
    """
    by_prompt: dict[str, dict[int, SavedSample]] = defaultdict(dict)
    for sample in sorted(samples, key=lambda sample: (sample.step, sample.sample_index)):
        by_prompt[sample.prompt_id].setdefault(sample.step, sample)
    # sorted() is stable: of equally frequent prompts the first seen go first.
    chosen = sorted(by_prompt.values(), key=len, reverse=True)[:MAX_PROMPTS]
    rows = [[row[step] for step in evenly_spaced(sorted(row), MAX_COLUMNS)] for row in chosen]
    columns = sorted({sample.step for row in rows for sample in row})
    if len(columns) > MAX_COLUMNS:
        return rows
    return [[row.get(step) for step in columns] for row in chosen]


def samples_section(samples: Sequence[SavedSample]) -> str:
    """Rows of prompts with their samples over steps; "" without a readable sample."""
    rows = pick_rows(samples)
    pictures = load_pictures([sample.path for row in rows for sample in row if sample is not None])
    if not pictures:
        return ""
    body = "".join(_row(row, pictures) for row in rows)
    return (
        "<section><header><h2>The same prompt over time</h2>"
        "<p>One row a prompt, its first sample at each saved step, with the reward it got.</p></header>"
        f'<div class="samples">{body}</div></section>'
    )


def _row(row: Sequence[SavedSample | None], pictures: Mapping[Path, Picture]) -> str:
    caption = next(sample.caption for sample in row if sample is not None)
    cells = "".join(
        '<li class="gap"></li>' if s is None or s.path not in pictures else _cell(s, pictures)
        for s in row
    )
    return (
        f'<article class="card"><h3>{escape(caption)}</h3><ol class="strip">{cells}</ol></article>'
    )


def _cell(sample: SavedSample, pictures: Mapping[Path, Picture]) -> str:
    names = " · ".join(f"{name} {pretty_number(value)}" for name, value in sample.rewards.items())
    title = (
        f"step {sample.step}, weights of version {sample.policy_version}: {names or 'no rewards'}"
    )
    picture = frame(pictures[sample.path], title=title, alt=f"{sample.caption}, step {sample.step}")
    return f"<li>{picture}<p><span>step {sample.step}</span><b>{pretty_number(sample.reward)}</b></p></li>"
