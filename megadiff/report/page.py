"""Render every HTML page that megadiff writes: one file that needs no network and no other file.

A page is a headline, tiles and sections. templates/page.html knows each part that a section can
have; Python only fills in the data.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from megadiff.observe.metrics import pretty_number
from megadiff.observe.text_files import write_whole
from megadiff.report.charts import Drawing

TEMPLATES = Path(__file__).parent / "templates"
# Prompts and names are a user's text, so everything is escaped but what a template itself writes.
ENVIRONMENT = Environment(
    loader=FileSystemLoader(TEMPLATES),
    autoescape=True,
    # A name that Python does not fill in is an error, and not an empty text.
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
ENVIRONMENT.filters["pretty"] = pretty_number
# Unlike tojson, escaped like any text: it stands in an attribute.
ENVIRONMENT.filters["json"] = partial(json.dumps, separators=(",", ":"), ensure_ascii=False)

Tile = tuple[str, str, str]  # label, value, detail; the last may be ""


@dataclass(frozen=True, kw_only=True)
class Section:
    """Data of a page's section; its parts stand in this order, and empty ones are left out.

    bars: bar_chart each. charts: line_chart each.
    table: rows of texts, the first is the head. log: the same, many rows in a fixed height.
    wall: see evaluation_page.wall. strips: see pictures.strips. time: see report.stage_times.
    note, config: text.
    """

    title: str
    lead: str = ""
    bars: Sequence[Drawing] = ()
    charts: Sequence[Drawing] = ()
    table: Sequence[Sequence[str]] = ()
    log: Sequence[Sequence[str]] = ()
    wall: Drawing | None = None
    strips: Sequence[Drawing] = ()
    time: Drawing | None = None
    note: str = ""
    config: str = ""

    @property
    def is_empty(self) -> bool:
        # A title with nothing under it would promise what the page does not have.
        return not any(value for name, value in vars(self).items() if name not in ("title", "lead"))


def write_page(path: Path, **parts: Any) -> Path:
    """Write a page aside and rename it, so that a reader never sees half of one; return its path.

    parts: kind (report or evaluation), name, state and headline, texts; tiles: Tile each;
    answers: PageAnswer each; sections: Section each. One that is left out is an error.
    """
    write_whole(path, ENVIRONMENT.get_template("page.html").render(parts))
    return path


def change_sentence(
    subject: str,
    first: str,
    last: str,
    *,
    gain: float,
    is_clear: bool,
    unclear: str = "within the noise",
) -> str:
    """Say what `subject` did from first to last; "rose" and "fell" are for clear gains only."""
    change = f"from {first} to {last}"
    if not is_clear:
        return f"{subject} went {change}: {unclear}."
    return f"{subject} {'rose' if gain > 0 else 'fell'} {change}."
