"""Prompt files: txt, jsonl, parquet."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megadiff.types import Prompt

logger = logging.getLogger(__name__)

Row = tuple[str, dict[str, object]]  # where it stands ("file:line"), and its columns


def load_prompts(path: str | Path, *, max_chars: int) -> list[Prompt]:
    """All prompts of a file, in its order.

    .txt: a prompt a line (UTF-8; blank lines are skipped, a line that starts with # is a prompt like any other).
    .jsonl: an object a line with `prompt`, optionally `negative_prompt`; its other keys become Prompt.fields.
    .parquet: the same as columns. max_chars: longest prompt allowed, in characters, negative prompt too.
    Equal prompts are kept, with a warning: they share an id, and so their noise when they meet in one step.
    ValueError, with file and line: a missing or empty file, another suffix, a row that is not as above.
    """
    path = Path(path)
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise ValueError(f"data.prompts={path}: unknown suffix {path.suffix!r}; known: {', '.join(READERS)}")
    if not path.is_file():
        raise ValueError(f"data.prompts={path}: {'not a file' if path.exists() else 'no such file'}; set data.prompts")
    prompts = [_prompt(where, row, max_chars) for where, row in reader(path)]
    if not prompts:
        raise ValueError(f"data.prompts={path}: holds 0 prompts, need at least 1")
    num_repeated = len(prompts) - len({prompt.id for prompt in prompts})
    if num_repeated:
        logger.warning("%s: %d of %d prompts repeat an earlier one", path, num_repeated, len(prompts))
    return prompts


def prompt_id(text: str, negative_text: str) -> str:
    """16 hex digits, a hash of both texts: the same in every run, layout and version."""
    return hashlib.blake2b(json.dumps([text, negative_text]).encode(), digest_size=8).hexdigest()


def _prompt(where: str, row: dict[str, object], max_chars: int) -> Prompt:
    if "prompt" not in row:
        raise ValueError(f"{where}: no 'prompt' among the keys {sorted(row)}; every row needs one")
    fields = dict(row)
    text = checked_text(where, "prompt", fields.pop("prompt"), max_chars)
    if not text.strip():
        raise ValueError(f"{where}: the prompt is empty; give it text or remove the row")
    negative_text = fields.pop("negative_prompt", None)
    if negative_text is None:
        negative_text = Prompt.negative_text
    negative_text = checked_text(where, "negative_prompt", negative_text, max_chars)
    return Prompt(text=text, id=prompt_id(text, negative_text), negative_text=negative_text, fields=fields)


def checked_text(where: str, key: str, text: object, max_chars: int) -> str:
    """The text, if it is a string of at most max_chars characters that UTF-8 can hold. ValueError otherwise."""
    if not isinstance(text, str):
        raise ValueError(f"{where}: {key!r} is {text!r} ({type(text).__name__}), must be a string")
    if len(text) > max_chars:
        raise ValueError(
            f"{where}: {key!r} has {len(text)} characters > data.max_prompt_chars={max_chars}; "
            "shorten it or raise the limit"
        )
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise ValueError(f"{where}: {key!r} holds half a surrogate pair (such as \\ud83d alone), which is no text")
    return text


def _txt_rows(path: Path) -> Iterator[Row]:
    for where, line in _lines(path):
        yield where, {"prompt": line}


def jsonl_rows(path: Path) -> Iterator[Row]:
    """The objects of a JSON lines file, each with its "file:line"."""
    for where, line in _lines(path):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not valid JSON ({error.msg} at column {error.colno}): {line[:80]!r}") from error
        if not isinstance(row, dict):
            raise ValueError(f'{where}: a {type(row).__name__}, must be an object such as {{"prompt": "a red circle"}}')
        yield where, row


def _parquet_rows(path: Path) -> Iterator[Row]:
    with open_parquet(path, key="data.prompts") as file:
        for number, row in enumerate(file.read().to_pylist(), start=1):
            yield f"{path}: row {number}", row


def open_parquet(path: Path, *, key: str) -> Any:
    """A pyarrow.parquet.ParquetFile. key: the config key that named the file. ValueError: no pyarrow, no parquet."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(f"{key}={path}: parquet needs pyarrow; run: pip install 'megadiff[parquet]'") from error
    try:
        return pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ValueError(f"{key}={path}: not a parquet file ({error})") from error


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Lines that are not blank, stripped, with "file:number". Only line feeds end a line: U+2028 is text."""
    raw = path.read_bytes()
    try:
        text = raw.decode("utf-8-sig")  # editors on Windows put a byte order mark in front
    except UnicodeDecodeError as error:
        number = raw.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{path}:{number}: byte 0x{raw[error.start]:02x} is not UTF-8 ({error.reason}); save the file as UTF-8"
        ) from error
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield f"{path}:{number}", line.strip()


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".txt": _txt_rows,
    ".jsonl": jsonl_rows,
    ".parquet": _parquet_rows,
}
