"""Read prompt files: txt, jsonl, parquet."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megadiff.process.workers import share_of_cores
from megadiff.tensors import model_files
from megadiff.types import Prompt

logger = logging.getLogger(__name__)

IMAGE_KEYS = ("image", "images")
MAX_READERS = 16
SHOWN_CHARS = 200  # of a value in a message; an image column may hold megabytes of pixels
Row = tuple[str, dict[str, object]]  # where it stands ("file:line"), and its columns


def load_prompts(
    path: str | Path,
    *,
    max_chars: int,
    check_images: Callable[[tuple[str, ...]], object] | None = None,
    key: str = "data.prompts",
) -> list[Prompt]:
    """Return all prompts of a file, in its order.

    .txt: a prompt a line, UTF-8. Blank lines are skipped; a line that starts with # is a prompt.
    .jsonl: an object a line with `prompt` and perhaps `negative_prompt`; other keys become
    Prompt.fields. .parquet: the same as columns.
    max_chars: longest prompt allowed, in characters, negative prompt too.
    check_images: where the model is given images. Every row then has an `image`, or `images`: files
    named relative to the prompt file's folder. It is called with the files of a row, once for equal
    ones, and raises ValueError for what cannot be given. Without it they are columns like others.
    key: of the config, which names the file; for messages.
    Equal prompts stay. They share an id; two of them in one step get different samples.
    Raises ValueError, with file and line, for a missing or empty file, another suffix, a row that
    is not as above and images that are refused.
    """
    path = Path(path)
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise ValueError(
            f"{key}={path}: unknown suffix {path.suffix!r}; known: {', '.join(READERS)}"
        )
    if not path.is_file():
        reason = "not a file" if path.exists() else "no such file"
        raise ValueError(f"{key}={path}: {reason}; set {key}")

    rows = list(reader(path))
    if not rows:
        raise ValueError(f"{key}={path}: holds 0 prompts, need at least 1")

    folder = path.parent if check_images else None
    prompts = [_prompt(where, row, max_chars, folder=folder) for where, row in rows]
    if check_images:
        wheres = {prompt.images: where for prompt, (where, _) in zip(prompts, rows, strict=True)}
        _check_all(wheres, check_images)
    elif any(isinstance(row.get("image"), str) or "images" in row for _, row in rows):
        logger.warning(
            "%s: its images go to rewards only; rollout.images=true gives them to the model", path
        )

    num_repeated = len(prompts) - len({prompt.id for prompt in prompts})
    if num_repeated:
        logger.info("%s: %d of %d prompts repeat an earlier one", path, num_repeated, len(prompts))
    return prompts


def prompt_id(text: str, negative_text: str, images: Sequence[str] = ()) -> str:
    """Return 16 hex digits, a hash of the texts and of how the row names its images.

    Noise follows from it: it must stay the same in every run, layout and version.
    """
    return digest_of(json.dumps([text, negative_text, *images]), size=8)


def digest_of(text: str, *, size: int = 16) -> str:
    """Return a hash of the text, two hex digits a byte. size: in bytes."""
    return hashlib.blake2b(text.encode(), digest_size=size).hexdigest()


def _check_all(
    wheres: Mapping[tuple[str, ...], str], check_images: Callable[[tuple[str, ...]], object]
) -> None:
    """Check images several rows at a time. wheres: files → a row that names them.

    Raises ValueError that names the row.
    """

    def check(images: tuple[str, ...]) -> None:
        try:
            check_images(images)
        except ValueError as error:
            raise ValueError(f"{wheres[images]}: {error}") from error

    with ThreadPoolExecutor(share_of_cores(MAX_READERS)) as pool:
        list(pool.map(check, wheres))  # raises what a thread raised


def _prompt(where: str, row: dict[str, object], max_chars: int, *, folder: Path | None) -> Prompt:
    """Check a row. folder: that of the images, where rows must name one."""
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

    names = _image_names(where, fields, folder) if folder else []

    return Prompt(
        text=text,
        # By name and not by path: prompts that are copied elsewhere keep their noise.
        id=prompt_id(text, negative_text, names),
        negative_text=negative_text,
        images=tuple(str(folder / name) for name in names) if folder else (),
        fields=fields,
    )


def _image_names(where: str, fields: dict[str, object], folder: Path) -> list[str]:
    """Take the names of the row's images out of its fields. Raises ValueError without any."""
    # a parquet file has all columns in every row, null where the row has none
    named = {key: fields.pop(key, None) for key in IMAGE_KEYS}
    given = {key: value for key, value in named.items() if value is not None}
    names = list(given.values())[0] if len(given) == 1 else None
    if isinstance(names, str):
        names = [names]
    if (
        not isinstance(names, list)
        or not names
        or not all(isinstance(name, str) and name for name in names)
    ):
        raise ValueError(
            f"{where}: its images are {_shortened(given)}, but with rollout.images=true every row "
            f"needs 'image', a file's name, or 'images', a list of them, relative to {folder}; "
            "write pixels or bytes to files, and name those"
        )
    return names


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}… ({len(text)} characters)"


def checked_text(where: str, key: str, text: object, max_chars: int) -> str:
    """Return the text.

    Raises ValueError unless it is a string of at most max_chars characters that UTF-8 can hold.
    """
    if not isinstance(text, str):
        raise ValueError(f"{where}: {key!r} is {text!r} ({type(text).__name__}), must be a string")
    if len(text) > max_chars:
        raise ValueError(
            f"{where}: {key!r} has {len(text)} characters > data.max_prompt_chars={max_chars}; "
            "shorten it or raise the limit"
        )
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise ValueError(
            f"{where}: {key!r} holds half a surrogate pair (such as \\ud83d alone), "
            "which is no text"
        )
    return text


def _txt_rows(path: Path) -> Iterator[Row]:
    for where, line in _lines(path):
        yield where, {"prompt": line}


def jsonl_rows(path: Path) -> Iterator[Row]:
    """Yield the objects of a JSON lines file, each with its "file:line"."""
    for where, line in _lines(path):
        row = parse_json(where, line)
        if not isinstance(row, dict):
            example = '{"prompt": "a red circle"}'
            raise ValueError(
                f"{where}: a {type(row).__name__}, must be an object such as {example}"
            )
        yield where, row


def parse_json(where: str | Path, text: str) -> object:
    """Return the JSON value. Raises ValueError, with where it stands, for anything else."""
    try:
        return model_files.parse_json(text)
    except ValueError as error:
        raise ValueError(f"{where}: not valid JSON ({error}): {text[:80]!r}") from None


def _parquet_rows(path: Path) -> Iterator[Row]:
    with open_parquet(path) as file, damage_named(path):
        table = file.read()

    repeated = sorted({name for name in table.column_names if table.column_names.count(name) > 1})
    if repeated:
        # to_pylist() would silently let the last one hide the others.
        raise ValueError(f"{path}: two columns are named {repeated[0]!r}; rename one")

    try:
        rows = table.to_pylist()
    except (ValueError, OverflowError) as error:  # e.g. a date beyond those of Python
        where = _unreadable_cell(path, table)
        raise ValueError(f"{where} cannot be read ({error}); correct or remove it") from error

    for number, row in enumerate(rows, start=1):
        yield f"{path}: row {number}", row


def _unreadable_cell(path: Path, table: Any) -> str:
    """Name the first cell of a pyarrow.Table that Python has no value for."""
    for name in table.column_names:
        for number, cell in enumerate(table[name], start=1):
            try:
                cell.as_py()
            except (ValueError, OverflowError):
                return f"{path}: row {number}: {name!r}"
    return str(path)


def open_parquet(path: Path, *, key: str = "") -> Any:
    """Return a pyarrow.parquet.ParquetFile. key: the config key that named the file, for messages.

    Raises ValueError when it is none.
    """
    import pyarrow  # half a second, for those who need it
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowInvalid, OSError) as error:
        where = f"{key}={path}" if key else str(path)
        raise ValueError(f"{where}: not a parquet file ({error})") from error


@contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """Raise pyarrow's errors, which do not name the file, as a ValueError that does."""
    try:
        yield
    except (ValueError, OverflowError, OSError) as error:
        raise ValueError(f"{path} is damaged ({error}); fetch it again") from error


def read_text(path: Path) -> str:
    """Return the file's text. Raises ValueError, with file and line, where it is not UTF-8."""
    raw = path.read_bytes()
    try:
        return raw.decode("utf-8-sig")  # editors on Windows put a byte order mark in front
    except UnicodeDecodeError as error:
        number = raw.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{path}:{number}: byte 0x{raw[error.start]:02x} is not UTF-8 ({error.reason}); "
            "save the file as UTF-8"
        ) from error


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield lines that are not blank, stripped, with "file:number"."""
    # Not splitlines(): U+2028 and its like are text.
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line.strip():
            yield f"{path}:{number}", line.strip()


READERS = {
    ".txt": _txt_rows,
    ".jsonl": jsonl_rows,
    ".parquet": _parquet_rows,
}
