"""Read the prompt files of public repositories, as rows for megadiff's .jsonl."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from megadiff.data.prompts import READERS, Row, checked_text, jsonl_rows, read_text

# The scorers of these sets read the first of them.
_QUOTED = re.compile(r'["“”]([^"“”]*[^"“”\s][^"“”]*)["“”]')


def import_rows(name: str, path: Path) -> list[dict[str, object]]:
    """Return the rows of a file in one of FORMATS, `prompt` and columns.

    Blank lines are skipped, a byte order mark too. Raises ValueError, with file and line, what was
    read and what was wanted, for anything else.
    """
    suffixes, reader, _ = FORMATS[name]
    if path.suffix.lower() not in suffixes:
        raise ValueError(
            f"{path}: its suffix is {path.suffix!r}, {name} needs {' or '.join(suffixes)}"
        )
    if not path.is_file():
        raise ValueError(f"{path}: {'not a file' if path.exists() else 'no such file'}")

    rows = [row for _, row in reader(path)]
    if not rows:
        raise ValueError(f"{path}: holds 0 prompts, need at least 1")
    return rows


def _plain_rows(path: Path) -> Iterator[Row]:
    """Yield a prompt a line."""
    for where, row in READERS[".txt"](path):
        line = str(row["prompt"])
        if line.startswith("{") and line.endswith("}"):
            raise _refused(where, line, "a prompt as plain text; is it a .jsonl by its content?")
        yield where, row


def _ocr_rows(path: Path) -> Iterator[Row]:
    """Yield a prompt a line, with the text to be written in `text`."""
    for where, row in _plain_rows(path):
        quoted = _QUOTED.search(str(row["prompt"]))
        if quoted is None:
            raise _refused(where, row["prompt"], 'a prompt with the text to write in quotes, "…"')
        yield where, {**row, "text": quoted[1].strip()}


def _geneval_rows(path: Path) -> Iterator[Row]:
    """Yield GenEval's objects. What their classes may be, only a detector knows."""
    for where, row in jsonl_rows(path):
        if not isinstance(row.get("prompt"), str) or not isinstance(row.get("tag"), str):
            raise _refused(where, row, "an object with the texts `prompt` and `tag`")
        checked_text(where, "prompt", row["prompt"], sys.maxsize)
        clauses = row.get("include")
        if not clauses or not _are_clauses(clauses) or not _are_clauses(row.get("exclude", [])):
            wanted = '`include`, and perhaps `exclude`, such as [{"class": "cup", "count": 2}]'
            raise _refused(where, row, wanted)
        yield where, row


def _are_clauses(entries: object) -> bool:
    return isinstance(entries, list) and all(
        isinstance(entry, dict) and {"class", "count"} <= entry.keys() for entry in entries
    )


def _drawbench_rows(path: Path) -> Iterator[Row]:
    """Yield the lines of a .txt, or of a .csv its columns Prompts and Category."""
    if path.suffix.lower() == ".txt":
        yield from _plain_rows(path)
        return

    # newline="": line breaks within a cell stay.
    table = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    try:
        header = [column.strip().lower() for column in next(table, [])]
        if header[:2] != ["prompts", "category"]:
            raise _refused(f"{path}:1", header, "the columns Prompts, Category")
        for cells in table:
            where = f"{path}:{table.line_num}"
            if not any(cells):
                continue
            if len(cells) < 2 or not cells[0].strip():
                raise _refused(where, cells, "two cells, a prompt and its category")
            yield where, {"prompt": cells[0].strip(), "category": cells[1].strip()}
    except csv.Error as error:
        raise _refused(f"{path}:{table.line_num}", error, "comma-separated cells") from error


def _refused(where: str, value: object, wanted: str) -> ValueError:
    shown = value if isinstance(value, str) else json.dumps(value, default=str)
    return ValueError(f"{where}: read {shown[:120]!r}, wanted {wanted}")


# name → suffixes, reader, where such files are
FORMATS: dict[str, tuple[tuple[str, ...], Callable[[Path], Iterator[Row]], str]] = {
    "ocr": ((".txt",), _ocr_rows, "flow_grpo's dataset/ocr/*.txt"),
    "geneval": (
        (".jsonl",),
        _geneval_rows,
        "geneval's evaluation_metadata.jsonl, flow_grpo's dataset/geneval/*_metadata.jsonl",
    ),
    "pickscore": ((".txt",), _plain_rows, "flow_grpo's dataset/pickscore/*.txt"),
    "drawbench": (
        (".csv", ".txt"),
        _drawbench_rows,
        "DrawBench as .csv (Prompts, Category) or .txt",
    ),
}
