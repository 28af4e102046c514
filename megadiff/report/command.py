"""Run `megadiff report RUN`: write a run's folder as one HTML page."""

from __future__ import annotations

import argparse
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from megadiff.report.report import write_report


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megadiff report", description="Write RUN/report.html, a page on its own."
    )
    parser.add_argument(
        "run", type=Path, help="a run's folder, e.g. runs/quickstart; it may still be going"
    )
    parser.add_argument("--open", action="store_true", help="show the page in a browser")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report and name it on stdout; return 0, or 2 where it cannot."""
    args = build_parser().parse_args(argv)
    try:
        path = write_report(args.run)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"megadiff report: {error}\n")
        return 2
    sys.stdout.write(f"{path}\n")
    if args.open:
        # as_uri() refuses a relative path.
        webbrowser.open(path.resolve().as_uri())
    return 0
