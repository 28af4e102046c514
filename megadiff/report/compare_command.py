"""Run `megadiff compare RUN RUN …`: write one page about several runs, and a summary as text."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megadiff.observe.text_files import write_whole
from megadiff.report.compare import (
    Pairing,
    Runs,
    config_rows,
    headline,
    overlays,
    pair_up,
    read_runs,
    stage_rows,
    summary_rows,
)
from megadiff.report.evaluation_table import align
from megadiff.report.page import ENVIRONMENT
from megadiff.report.report import TEXTS

NUM_COLOURS = 8
LEADS = {name: section["lead"] for name, section in TEXTS["sections"].items()}
LEADS["Rewards"] = "Each reward by itself."  # the report's own speaks of its samples


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megadiff compare",
        description="Lay runs over each other on one page, and print a summary. Put the baseline "
        "first: evaluations are paired with the earlier run's.",
    )
    parser.add_argument("runs", type=Path, nargs="+", help="folders, e.g. runs/a runs/b")
    parser.add_argument(
        "--out", type=Path, default=Path("compare.html"), help="the page (compare.html)"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page, then the summary and the page's name on stdout; 2 where a RUN is no run."""
    args = build_parser().parse_args(argv)
    try:
        _check_out(args.out)
        runs = read_runs(args.runs)
        write_comparison(args.out, runs)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"megadiff compare: {error}\n")
        return 2
    sys.stdout.write(f"{to_text(runs)}\n{args.out}\n")
    return 0


def _check_out(page: Path) -> None:
    """Raise ValueError for a place of the page that is a file of another kind, or no place."""
    if page.exists() and page.suffix != ".html":
        raise ValueError(f"--out {page} is there and no .html; give another name")
    if not page.absolute().parent.is_dir():
        raise ValueError(f"--out {page}: there is no folder {page.parent}; make it first")


def write_comparison(path: Path, runs: Runs) -> Path:
    """Write the page, which needs no network and no other file, and return its path."""
    pairing = pair_up(runs)
    page = ENVIRONMENT.get_template("compare.html").render(
        names=list(runs),
        num_colours=NUM_COLOURS,
        headline=headline(runs, pairing).replace(" %", "\N{NO-BREAK SPACE}%"),
        summary=summary_rows(runs),
        config=config_rows(runs),
        pairing=pairing,
        stages=stage_rows(runs),
        charts=overlays(runs),
        leads=LEADS,
    )
    write_whole(path, page)

    return path


def to_text(runs: Runs) -> str:
    """Write the page's sentence and its tables, the curves left out, for a terminal."""
    pairing = pair_up(runs)
    blocks = [headline(runs, pairing), align(summary_rows(runs)), _pairing_text(pairing)]
    config = config_rows(runs)
    if len(config) > 1:
        blocks.append(align(config))
    else:
        blocks.append("The configs are the same.")
    blocks.append(align(stage_rows(runs)))
    return "\n\n".join(filter(None, blocks)) + "\n"


def _pairing_text(pairing: Pairing) -> str:
    rows = [align(pairing.rows)] if pairing.rows else []
    return "\n".join([*rows, *pairing.notes])
