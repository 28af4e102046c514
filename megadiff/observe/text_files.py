"""Write text files whole, and read files of JSON lines that a killed run may have torn."""

from __future__ import annotations

import json
import logging
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

logger = logging.getLogger(__name__)
Parsed = TypeVar("Parsed")


def write_whole(path: Path, text: str) -> None:
    """Write a file aside and rename it, so that a reader never sees half of it.

    A link is followed. Where a device or a pipe stands, such as /dev/null, it is written to. A
    writer that is killed leaves its file aside, .NAME.HEX, behind.
    """
    # A rename would take its place, for every other process too.
    if path.exists() and not path.is_file():
        path.write_text(text, "utf-8")
        return

    target = Path(os.path.realpath(path))
    # A name of its own: of two writers each publishes a whole file.
    aside = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    try:
        aside.write_text(text, "utf-8")
        os.replace(aside, target)
    except BaseException:  # of Ctrl-C as well
        aside.unlink(missing_ok=True)
        raise


def read_lines(path: Path) -> list[str]:
    """Return the lines with their ends. Unlike str.splitlines(), U+2028 and its like are text."""
    # A killed run may have torn its last line within a character.
    with path.open("r", encoding="utf-8", errors="replace") as file:
        return list(file)


def parse_line(line: str) -> Any:
    """Return the line's JSON value, None where there is none: it is torn, or nested too deep."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def parse_lines(path: Path, parse: Callable[[str], Parsed | None]) -> Iterator[Parsed]:
    """Yield what `parse` makes of each line; warn of those of which it makes None."""
    for number, line in enumerate(read_lines(path), start=1):
        parsed = parse(line)
        if parsed is None:
            logger.warning("%s: line %d is torn and skipped", path, number)
        else:
            yield parsed


def text_between(page: str, text: str, *, start: str, end: str) -> str:
    """Return the page with other text between two marks. Raises ValueError where they lack."""
    before, found_start, rest = page.partition(start)
    _, found_end, after = rest.partition(end)
    if not found_start or not found_end:
        raise ValueError(f"the page lacks the lines {start.strip()!r} and {end!r}; add them")
    return f"{before}{start}\n{text}\n{end}{after}"


def rewrite_page(argv: Sequence[str], with_table: Callable[[str], str], *, usage: str) -> int:
    """Rewrite the page that argv names, for a program that makes its table.

    Returns the program's exit code: 2, with the usage on stderr, for other arguments than a page.
    """
    if len(argv) != 1:
        sys.stderr.write(f"{usage}\n")
        return 2
    page = Path(argv[0])
    page.write_text(with_table(page.read_text(encoding="utf-8")), encoding="utf-8")
    return 0
