"""The shell of every HTML page that megadiff writes: one file that needs nothing but itself, no network, no other file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>{name} · megadiff {kind}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<main>
<header class="masthead">
<p class="run"><b>megadiff</b><code>{name}</code><span>{state}</span><button type="button" id="theme">Dark</button></p>
<h1>{headline}</h1>
<ul class="tiles">{tiles}</ul>
{findings}
</header>
{sections}
</main>
<dialog id="zoom"></dialog>
<script>{script}</script>
</body>
</html>
"""


def render_page(
    *,
    kind: str,
    name: str,
    state: str,
    headline: str,
    tiles: Sequence[str],
    sections: Sequence[str],
    findings: str = "",
) -> str:
    """The HTML of a page. kind: report, evaluation. tiles, sections, findings: HTML; the others are plain text."""
    assets = Path(__file__).parent
    return PAGE.format(
        kind=escape(kind),
        name=escape(name),
        state=escape(state),
        headline=escape(headline),
        tiles="".join(tiles),
        findings=findings,
        sections="".join(sections),
        style=(assets / "report.css").read_text("utf-8"),
        script=(assets / "report.js").read_text("utf-8"),
    )


def tile(label: str, value: str, detail: str = "") -> str:
    """One of the numbers that one looks for first."""
    return f'<li class="tile"><span>{escape(label)}</span><strong>{escape(value)}</strong><em>{escape(detail)}</em></li>'


def section(title: str, body: str, *, lead: str = "") -> str:
    """A part of the page under its own heading. body: HTML."""
    return (
        f"<section><header><h2>{escape(title)}</h2><p>{escape(lead)}</p></header>{body}</section>"
    )


def write_page(path: Path, html: str) -> Path:
    """Writes the page aside and renames it, so that a reader never sees half of one; returns its path."""
    aside = path.with_name(f".{path.name}")
    aside.write_text(html, "utf-8")
    os.replace(aside, path)
    return path
