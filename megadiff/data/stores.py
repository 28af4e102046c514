"""Where captioned images are stored: a folder with metadata.jsonl, a parquet file, a webdataset tar.

A shelf is indexed once, when it is opened: captions, and where the bytes of each image lie. Images are read one by one.
"""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from megadiff.data.prompts import jsonl_rows, open_parquet, parse_json

METADATA = "metadata.jsonl"
FILE_KEYS = ("file_name", "image")
CAPTION_KEYS = ("caption", "text", "prompt")
IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp")
CAPTION_SUFFIXES = ("txt", "json")


class Shelf(Protocol):
    """captions: of all its images, in order. stamp: changes when a file does (names, sizes, modification times)."""

    captions: list[str]
    stamp: str

    def where(self, row: int) -> str:
        """Names an image in errors: file and line, row or member."""

    def read(self, row: int) -> bytes:
        """The image's encoded bytes. Threads may call it at the same time."""


class FolderShelf:
    """metadata.jsonl: rows {"file_name" | "image": path in this folder, "caption" | "text" | "prompt": text}.

    ValueError with file and line: a row without either, a path that leaves the folder, a missing image.
    """

    def __init__(self, folder: Path) -> None:
        self.captions: list[str] = []
        self._paths: list[Path] = []
        self._wheres: list[str] = []
        stamps = []
        for where, row in jsonl_rows(folder / METADATA):
            name = row[_key_of(where, row, FILE_KEYS, "image")]
            path = _inside(folder, name, where)
            if not path.is_file():
                raise ValueError(f"{where}: {path} does not exist; restore it or remove the row")
            self._paths.append(path)
            self._wheres.append(where)
            self.captions.append(_caption(where, row))
            stamps.append(_stamp(path))
        self.stamp = _digest([*stamps, *self.captions])

    def where(self, row: int) -> str:
        return f"{self._wheres[row]} ({self._paths[row].name})"

    def read(self, row: int) -> bytes:
        return self._paths[row].read_bytes()


class ParquetShelf:
    """Columns image (bytes, or a struct with bytes, as Hugging Face datasets writes) and caption | text | prompt.

    Captions are held in memory, and two row groups of images at a time, shared by all threads.
    ValueError: no such columns, a row without caption or image.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._file, self._lock = (
            path,
            open_parquet(path, key="data.images"),
            threading.Lock(),
        )
        self._groups: OrderedDict[int, Any] = OrderedDict()
        columns = {name: None for name in self._file.schema_arrow.names}
        if "image" not in columns:
            raise ValueError(
                f"{path}: no column 'image' among {sorted(columns)}; name the column of image bytes so"
            )
        key = _key_of(str(path), columns, CAPTION_KEYS, "caption")
        with self._damage_named():
            texts = self._file.read(columns=[key])[key].to_pylist()
        self.captions = [_caption(self.where(row), {key: text}) for row, text in enumerate(texts)]
        self.stamp = _stamp(path)
        metadata = self._file.metadata
        self._ends = list(
            accumulate(
                metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)
            )
        )

    def where(self, row: int) -> str:
        return f"{self._path}: row {row + 1}"

    def read(self, row: int) -> bytes:
        value = self._value(row)
        data = value.get("bytes") if isinstance(value, Mapping) else value
        if not isinstance(data, bytes):
            raise ValueError(
                f"{self.where(row)}: 'image' holds no bytes but {str(value)[:80]!r}; write the encoded images into the file"
            )
        return data

    def _value(self, row: int) -> object:
        group = bisect_right(self._ends, row)
        with self._lock, self._damage_named():
            if group not in self._groups:
                if (
                    len(self._groups) == 2
                ):  # readers work in order, so that at most two groups are read at a time
                    self._groups.popitem(last=False)
                self._groups[group] = self._file.read_row_group(group, columns=["image"])["image"]
            return self._groups[group][
                row - self._ends[group]
            ].as_py()  # counted from the group's end

    @contextmanager
    def _damage_named(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, OverflowError, OSError) as error:  # pyarrow's, without the file
            raise ValueError(f"{self._path} is damaged ({error}); fetch it again") from error


class TarShelf:
    """A webdataset: members KEY.jpg|jpeg|png|webp and KEY.txt (the caption) or KEY.json (an object that holds it).

    Scanned once for the offsets; image data is not read. Where there are both, the .txt is the caption. Other members
    are ignored. ValueError with the member: an image without caption or a caption without image, a cut archive.
    """

    def __init__(self, path: Path) -> None:
        self._path, self.stamp = path, _stamp(path)
        self.captions: list[str] = []
        self._members: list[Member] = []
        with open(path, "rb") as file:
            for key, parts in _samples(path).items():
                image = next((parts[suffix] for suffix in IMAGE_SUFFIXES if suffix in parts), None)
                caption = next(
                    (parts[suffix] for suffix in CAPTION_SUFFIXES if suffix in parts), None
                )
                if image is None or caption is None:
                    missing = IMAGE_SUFFIXES if image is None else CAPTION_SUFFIXES
                    raise ValueError(
                        f"{path}: sample {key!r} has no {key}.{'|'.join(missing)}; it needs both"
                    )
                self.captions.append(
                    _member_caption(
                        f"{path}: {caption.name}", _read_at(file, caption.offset, caption.size)
                    )
                )
                self._members.append(image)

    def where(self, row: int) -> str:
        return f"{self._path}: {self._members[row].name}"

    def read(self, row: int) -> bytes:
        with open(self._path, "rb") as file:
            return _read_at(file, self._members[row].offset, self._members[row].size)


class Member(NamedTuple):
    """A tar's member: its name, and where its data begins and how many bytes it has."""

    name: str
    offset: int
    size: int


SHELVES = {".parquet": ParquetShelf, ".tar": TarShelf}


def _samples(path: Path) -> dict[str, dict[str, Member]]:
    """Key → suffix → member, for the suffixes that matter. ValueError for an archive that is cut or damaged."""
    samples: dict[str, dict[str, Member]] = {}
    try:
        with tarfile.open(path, "r:") as archive:
            while (member := archive.next()) is not None:
                archive.members.clear()  # a kilobyte each, which nobody needs any more
                folder, name = os.path.split(member.name)
                stem, _, suffix = name.partition(".")
                suffix = suffix.lower()
                if (
                    not member.isfile()
                    or not stem
                    or suffix not in IMAGE_SUFFIXES + CAPTION_SUFFIXES
                ):
                    continue
                parts = samples.setdefault(os.path.join(folder, stem), {})
                for other in parts:
                    if suffix == other or {suffix, other} <= set(IMAGE_SUFFIXES):
                        raise ValueError(
                            f"{path}: {member.name} and {parts[other].name} are of one sample; keep one"
                        )
                parts[suffix] = Member(member.name, member.offset_data, member.size)
            end = archive.offset
    except tarfile.TarError as error:
        raise ValueError(
            f"{path} ({path.stat().st_size} bytes) is not a whole tar ({error}); fetch it again"
        ) from error
    with open(path, "rb") as file:
        if _read_at(file, end, tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            # tarfile takes a damaged or missing header for the end, and all that follows would be lost in silence
            raise ValueError(
                f"{path} has no end mark at byte {end}: it is cut short or damaged; fetch it again"
            )
    return samples


def _member_caption(where: str, data: bytes) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: {error}; a caption is UTF-8 text or a JSON object") from error
    is_json = where.lower().endswith(".json")
    value = parse_json(where, text) if is_json else {"text": text.strip()}
    if not isinstance(value, dict):
        raise ValueError(
            f"{where}: a {type(value).__name__}, must be an object that holds the caption"
        )
    return _caption(where, value)


def _caption(where: str, row: Mapping[str, object]) -> str:
    text = row[_key_of(where, row, CAPTION_KEYS, "caption")]
    if not isinstance(text, str) or not text.strip():
        raise ValueError(
            f"{where}: the caption is {text!r}, must be text; write one or remove the row"
        )
    return text


def _key_of(where: str, row: Mapping[str, object], keys: tuple[str, ...], what: str) -> str:
    """The first of the keys that the row has."""
    for key in keys:
        if key in row:
            return key
    raise ValueError(
        f"{where}: no {what} among the keys {sorted(row)}; name it {' or '.join(keys)}"
    )


def _inside(folder: Path, name: object, where: str) -> Path:
    """The named file. It may be a link, but its name must not lead out of the folder."""
    if not isinstance(name, str) or not name:
        raise ValueError(f"{where}: the image is {name!r}, must be a path in {folder}")
    if os.path.isabs(name) or os.path.normpath(name).split(os.sep)[0] == os.pardir:
        raise ValueError(f"{where}: {name!r} leaves {folder}; give a path inside that folder")
    return folder / name


def _read_at(file: BinaryIO, offset: int, size: int) -> bytes:
    file.seek(offset)
    return file.read(size)


def _stamp(path: Path) -> str:
    status = path.stat()
    return f"{path.name} {status.st_size} {status.st_mtime_ns}"


def _digest(parts: list[str]) -> str:
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
