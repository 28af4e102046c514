"""Stored captioned images or pairs of them: metadata.jsonl, a parquet file, a webdataset tar.

A store is indexed once, when it is opened: captions, and where the bytes of each image lie.
Images are read one by one.

Hugging Face's `datasets` reads these formats too, and was measured on each (5.2, 1,500 images of
70 MiB). It copies a parquet file or a tar into a cache of the same size, a tar that is cut loads as
its first 700 images without a word, and errors name no row. imagefolder takes 6 s to open what is
opened here in 0.1 s, and accepts rows without a caption and files that are missing.
"""

from __future__ import annotations

import json
import logging
import os
import tarfile
import threading
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from megadiff.data.prompts import damage_named, digest_of, jsonl_rows, open_parquet, parse_json

logger = logging.getLogger(__name__)

METADATA = "metadata.jsonl"
PAD_BYTES = 2**20  # of what follows a tar's end are read at once
# Columns go by several names in others' data sets. The first that a row has counts.
FILE_KEYS = ("file_name", "image")
# of a pair's two images; Hugging Face's imagefolder knows a file by the suffix
PAIR_KEYS = (("chosen_file_name", "chosen"), ("rejected_file_name", "rejected"))
CAPTION_KEYS = ("caption", "text", "prompt")
IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp")
CAPTION_SUFFIXES = ("txt", "json")


class ImageStore:
    """Base of the stores. captions: of all images, in order; those of a pair follow each other.

    stamp: changes when a file does (names, sizes, modification times).
    """

    captions: list[str]
    stamp: str

    def where(self, row: int) -> str:
        """Name an image in errors: file and line, row or member."""
        raise NotImplementedError

    def read(self, row: int) -> bytes:
        """Return the image's encoded bytes. Threads may call it at the same time."""
        raise NotImplementedError


class FolderStore(ImageStore):
    """metadata.jsonl with rows {"file_name" | "image": path, "caption" | "text" | "prompt": text}.

    image_keys: for each image of a row the names that it may go by.
    Raises ValueError, with file and line, for a row without caption or image, a path that leaves
    the folder, a missing image, and one that is both images of a pair.
    """

    def __init__(
        self, folder: Path, *, image_keys: tuple[tuple[str, ...], ...] = (FILE_KEYS,)
    ) -> None:
        self.captions = []
        self._paths: list[Path] = []
        self._lines: list[str] = []
        stamps = []

        for where, row in jsonl_rows(folder / METADATA):
            paths: list[Path] = []
            for keys in image_keys:
                name = row[_first_key(where, row, keys, keys[-1])]
                path = _path_inside(folder, name, where)
                if not path.is_file():
                    raise ValueError(
                        f"{where}: {path} does not exist; restore it or remove the row"
                    )
                if path in paths:
                    raise ValueError(
                        f"{where}: {path} is both chosen and rejected; name two images"
                    )
                paths.append(path)
                self._lines.append(where)
                self.captions.append(_caption(where, row))
                stamps.append(_stamp(path))
            self._paths += paths
        self.stamp = digest_of(json.dumps(stamps + self.captions))

    def where(self, row: int) -> str:
        return f"{self._lines[row]} ({self._paths[row].name})"

    def read(self, row: int) -> bytes:
        return self._paths[row].read_bytes()


class ParquetStore(ImageStore):
    """Columns of images (bytes, or Hugging Face's struct with bytes) and caption | text | prompt.

    columns: those of a row's images. key: the config key that named the file.
    In memory are the captions and two row groups of images, for all threads.
    Raises ValueError for other columns, and for a row without caption or image.
    """

    def __init__(
        self, path: Path, *, columns: tuple[str, ...] = ("image",), key: str = "data.images"
    ) -> None:
        self._path = path
        self._file = open_parquet(path, key=key)
        self._columns = columns
        self._lock = threading.Lock()
        # Readers work in order, so that at most two neighbouring groups are read at a time.
        read_group = partial(self._file.read_row_group, columns=list(columns))
        self._cached_group = lru_cache(maxsize=2)(read_group)

        names = self._file.schema_arrow.names
        for column in columns:
            if column not in names:
                raise ValueError(
                    f"{path}: no column {column!r} among {sorted(names)}; "
                    "name the column of image bytes so"
                )

        caption_key = _first_key(str(path), dict.fromkeys(names), CAPTION_KEYS, "caption")
        with damage_named(self._path):
            texts = self._file.read(columns=[caption_key])[caption_key].to_pylist()
        self.captions = []
        for text in texts:
            where = self.where(len(self.captions))
            self.captions += [_caption(where, {caption_key: text})] * len(columns)
        self.stamp = _stamp(path)

        metadata = self._file.metadata
        groups = range(metadata.num_row_groups)
        self._ends = list(accumulate(metadata.row_group(group).num_rows for group in groups))

    def where(self, row: int) -> str:
        return f"{self._path}: row {row // len(self._columns) + 1}"

    def read(self, row: int) -> bytes:
        where = self.where(row)
        row, number = divmod(row, len(self._columns))
        column = self._columns[number]
        group = bisect_right(self._ends, row)
        with self._lock, damage_named(self._path):
            images = self._cached_group(group)[column]
            # Negative: counted from the group's end.
            value = images[row - self._ends[group]].as_py()

        data = value.get("bytes") if isinstance(value, Mapping) else value
        if not isinstance(data, bytes):
            raise ValueError(
                f"{where}: {column!r} holds no bytes but {str(value)[:80]!r}; "
                "write the encoded images into the file"
            )
        return data


class TarStore(ImageStore):
    """Read a webdataset: KEY.jpg|jpeg|png|webp with KEY.txt (the caption) or KEY.json (with it).

    Where there are both, the .txt is the caption. Other members are ignored.
    The archive is scanned once for offsets; image data is not read.
    Raises ValueError, with the member, for an image without caption, a caption without image and a
    cut archive.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.stamp = _stamp(path)
        self.captions = []
        self._images: list[TarMember] = []

        for key, members in _samples(path).items():
            image = self._first_member(key, members, IMAGE_SUFFIXES)
            caption = self._first_member(key, members, CAPTION_SUFFIXES)
            data = _read_at(path, caption.offset, caption.size)
            self.captions.append(_member_caption(f"{path}: {caption.name}", data))
            self._images.append(image)

    def where(self, row: int) -> str:
        return f"{self._path}: {self._images[row].name}"

    def read(self, row: int) -> bytes:
        image = self._images[row]
        return _read_at(self._path, image.offset, image.size)

    def _first_member(
        self, key: str, members: Mapping[str, TarMember], suffixes: tuple[str, ...]
    ) -> TarMember:
        for suffix in suffixes:
            if suffix in members:
                return members[suffix]
        raise ValueError(
            f"{self._path}: sample {key!r} has no {key}.{'|'.join(suffixes)}; it needs both"
        )


class TarMember(NamedTuple):
    """A member's name, and where its data begins and how many bytes it has."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True, kw_only=True)
class ItemKind:
    """Say what an item of a supervised run is, and what stores it.

    key: of the config. images: of an item. formats: for errors. folder: opens one with
    metadata.jsonl. files: suffix → what opens such a file.
    """

    key: str
    images: int
    formats: str
    folder: Callable[[Path], ImageStore]
    files: Mapping[str, Callable[[Path], ImageStore]]


IMAGES = ItemKind(
    key="data.images",
    images=1,
    formats="a folder with metadata.jsonl, a .parquet or .tar file, or module:Class",
    folder=FolderStore,
    files={".parquet": ParquetStore, ".tar": TarStore},
)
# A row is two images of one caption: the chosen one, then the rejected one.
PAIRS = ItemKind(
    key="data.pairs",
    images=2,
    formats="a folder with metadata.jsonl, or a .parquet file",
    folder=partial(FolderStore, image_keys=PAIR_KEYS),
    files={
        ".parquet": partial(ParquetStore, columns=("chosen", "rejected"), key="data.pairs"),
    },
)


def _samples(path: Path) -> dict[str, dict[str, TarMember]]:
    """Return key → suffix → member, for the suffixes that matter.

    Raises ValueError for an archive that is cut or damaged.
    """
    samples: dict[str, dict[str, TarMember]] = {}
    strays: list[str] = []
    try:
        # "r:" takes no compression: members of a compressed archive cannot be read by offset.
        with tarfile.open(path, "r:") as archive:
            while (member := archive.next()) is not None:
                # a kilobyte each, which nobody needs any more
                archive.members.clear()  # type: ignore[attr-defined]  # typeshed lacks it
                if member.isfile():
                    _add_member(samples, path, member)
                    if _is_stray_image(member.name):
                        strays.append(member.name)
            end = archive.offset
    except tarfile.TarError as error:
        raise ValueError(
            f"{path} ({path.stat().st_size} bytes) is not a whole tar ({error}); fetch it again"
        ) from error

    # tarfile takes a damaged or missing header for the end: all that follows would be lost.
    if _read_at(path, end, tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise ValueError(
            f"{path} has no end mark at byte {end}: it is cut short or damaged; fetch it again"
        )
    size = path.stat().st_size
    for start in range(end, size, PAD_BYTES):
        if any(_read_at(path, start, min(PAD_BYTES, size - start))):
            raise ValueError(
                f"{path} has its end mark at byte {end} of {size}, but more than padding behind "
                "it, as archives that were joined; give them as files in one folder"
            )

    if strays:
        logger.warning(
            "%s: %d images are left out, as %s: a sample's name ends at its first dot, and the "
            "rest must be one of %s; rename those that should be trained",
            path,
            len(strays),
            strays[0],
            ", ".join(IMAGE_SUFFIXES),
        )
    return samples


def _is_stray_image(name: str) -> bool:
    """Tell whether an image has a second dot: `1.seg.png` is no image of sample 1."""
    stem, _, suffix = os.path.basename(name).lower().partition(".")
    if not stem:  # of macOS, beside each file
        return False
    return suffix not in IMAGE_SUFFIXES and suffix.rpartition(".")[2] in IMAGE_SUFFIXES


def _add_member(
    samples: dict[str, dict[str, TarMember]], path: Path, member: tarfile.TarInfo
) -> None:
    """Add a member to its sample. Raises ValueError for a second one of its kind."""
    folder, name = os.path.split(os.path.normpath(member.name))
    stem, _, suffix = name.partition(".")
    suffix = suffix.lower()
    if not stem or suffix not in IMAGE_SUFFIXES + CAPTION_SUFFIXES:
        return

    members = samples.setdefault(os.path.join(folder, stem), {})
    for other, earlier in members.items():
        if suffix == other or {suffix, other} <= set(IMAGE_SUFFIXES):
            raise ValueError(
                f"{path}: {member.name} and {earlier.name} are of one sample; keep one"
            )

    members[suffix] = TarMember(member.name, member.offset_data, member.size)


def _member_caption(where: str, data: bytes) -> str:
    try:
        text = data.decode("utf-8-sig")  # editors on Windows put a byte order mark in front
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: {error}; a caption is UTF-8 text or a JSON object") from error

    if not where.lower().endswith(".json"):
        return _caption(where, {"text": text.strip()})

    value = parse_json(where, text)
    if not isinstance(value, dict):
        raise ValueError(
            f"{where}: a {type(value).__name__}, must be an object that holds the caption"
        )
    return _caption(where, value)


def _caption(where: str, row: Mapping[str, object]) -> str:
    text = row[_first_key(where, row, CAPTION_KEYS, "caption")]
    if not isinstance(text, str) or not text.strip():
        raise ValueError(
            f"{where}: the caption is {text!r}, must be text; write one or remove the row"
        )
    return text


def _first_key(where: str, row: Mapping[str, object], keys: tuple[str, ...], what: str) -> str:
    """Return the first of the keys that the row has."""
    for key in keys:
        if key in row:
            return key
    raise ValueError(
        f"{where}: no {what} among the keys {sorted(row)}; name it {' or '.join(keys)}"
    )


def _path_inside(folder: Path, name: object, where: str) -> Path:
    """Return the named file. It may be a link, but its name must not lead out of the folder."""
    if not isinstance(name, str) or not name:
        raise ValueError(f"{where}: the image is {name!r}, must be a path in {folder}")
    # Data sets come from others: a row must not make the run read files of the user's.
    if os.path.isabs(name) or os.path.normpath(name).split(os.sep)[0] == os.pardir:
        raise ValueError(f"{where}: {name!r} leaves {folder}; give a path inside that folder")
    return folder / name


def _read_at(path: Path, offset: int, size: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(size)


def _stamp(path: Path) -> str:
    status = path.stat()
    # By name and not by path: a copy in another folder is the same data.
    return f"{path.name} {status.st_size} {status.st_mtime_ns}"
