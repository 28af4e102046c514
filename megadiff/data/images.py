"""Captioned images for supervised training: stored ones, pairs too, or those of a user's class."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import TypeVar

import numpy as np

from megadiff.data.pixels import decode, fit, is_enlarged
from megadiff.data.prompts import digest_of
from megadiff.data.stores import IMAGES, METADATA, ImageStore, ItemKind
from megadiff.process.doors import import_class
from megadiff.process.workers import share_of_cores

T = TypeVar("T")

MAX_WORKERS = 16


@dataclass(frozen=True, kw_only=True)
class Block:
    """Hold consecutive rows. pixels_BHWC: uint8 RGB. captions: B. num_enlarged: see is_enlarged."""

    pixels_BHWC: np.ndarray
    captions: Sequence[str]
    num_enlarged: int


class ImageSource:
    """Base of all sources: a sequence of captioned images. Row i is the same in every process.

    A class of your own gets what data.images=module:Class:A:B has after the class, as strings,
    and the config's seed: Class("A", "B", run_seed=seed). It may raise ValueError.
    name: as configured, set by open_images. fingerprint: changes when the data does.
    captions: of all rows; empty where blocks() alone knows them.
    images_per_item: 2 where rows 2i and 2i + 1 are a pair of one caption, chosen and rejected.
    """

    name: str
    fingerprint: str
    captions: Sequence[str] = ()
    images_per_item: int = 1

    def __len__(self) -> int:
        raise NotImplementedError

    @property
    def num_items(self) -> int:
        """The number of images or pairs."""
        return len(self) // self.images_per_item

    def where(self, row: int) -> str:
        """Name a row in errors."""
        return f"{self.name}: image {row}"

    def pixels(self, row: int) -> np.ndarray:
        """Return uint8 [H, W, 3] RGB, in the stored size. Threads may call it at the same time.

        Raises ValueError, with where(row), for an image that cannot be read.
        """
        raise NotImplementedError

    def blocks(
        self, start: int, stop: int, *, size: int, height: int, width: int
    ) -> Generator[Block]:
        """Yield rows start … stop−1 in order, fitted to height × width, at most `size` a block.

        Workers read ahead.
        """

        def fitted(row: int) -> tuple[np.ndarray, bool]:
            pixels = self.pixels(row)
            return fit(pixels, height, width), is_enlarged(pixels, height, width)

        calls = (partial(fitted, row) for row in range(start, stop))
        # Threads are enough: reading, decoding and resampling release the GIL.
        images = read_ahead(ThreadPoolExecutor(share_of_cores(MAX_WORKERS)), calls, depth=2 * size)
        while rows := list(islice(images, size)):
            yield Block(
                pixels_BHWC=np.stack([pixels for pixels, _ in rows]),
                captions=self.captions[start : start + len(rows)],
                num_enlarged=sum(enlarged for _, enlarged in rows),
            )
            start += len(rows)


def open_images(source: str, *, seed: int, kind: ItemKind = IMAGES) -> ImageSource:
    """Open what data.images or data.pairs names. Stored images are indexed; none is read yet.

    A folder with metadata.jsonl; a .parquet or .tar file; a folder of files of one of these kinds,
    in the order of their names; or a class derived from ImageSource, see there. Pairs are in
    neither a .tar nor a class.
    Raises ValueError for anything else, for no images at all, for what a store refuses, and for a
    class without a fingerprint.
    """
    path = Path(source)
    key = f"{kind.key}={source}"

    # An older form of the key; as it reads like module:Class it would fail with another message.
    if source.startswith("shapes:"):
        now = f"examples.shapes.images:ShapesImages:{source.removeprefix('shapes:')}"
        raise ValueError(f"data.images={source}: the shapes are a class now; say data.images={now}")

    if path.is_dir():
        stores = _stores_of_folder(path, kind)
    elif not path.exists() and ":" in source and kind is IMAGES:
        return _constructed(source, seed)
    elif not path.exists():
        raise ValueError(f"{key}: no such file or folder; give {kind.formats}")
    elif path.suffix.lower() not in kind.files:
        raise ValueError(
            f"{key}: unknown suffix {path.suffix!r}; known: {', '.join(kind.files)}, or a folder"
        )
    else:
        stores = [kind.files[path.suffix.lower()](path)]

    images = StoredImages(source, stores, images_per_item=kind.images)
    if not len(images):
        items = kind.key.removeprefix("data.")
        raise ValueError(f"{key}: holds 0 captioned {items}, need at least 1")
    return images


def _constructed(source: str, seed: int) -> ImageSource:
    module_name, class_name, *arguments = source.split(":")
    key = f"data.images={source}"
    source_class = import_class(f"{module_name}:{class_name}", ImageSource, key=key)
    try:
        images = source_class(*arguments, run_seed=seed)
    except (TypeError, ValueError) as error:  # the constructor refuses a value, or their number
        raise ValueError(f"{key}: {error}") from error
    images.name = source
    _check_constructed(images, key)
    return images


def _check_constructed(images: ImageSource, key: str) -> None:
    """Raise ValueError for what would fail later, in the cache of latents or the order of rows."""
    num_rows = len(images)
    if not num_rows:
        raise ValueError(f"{key}: holds 0 captioned images, need at least 1")
    if num_rows % images.images_per_item:
        raise ValueError(
            f"{key}: {num_rows} images are not a multiple of images_per_item="
            f"{images.images_per_item}: rows 2i and 2i + 1 are a pair; give both images of each"
        )
    fingerprint = getattr(images, "fingerprint", None)
    if not isinstance(fingerprint, str) or not fingerprint:
        raise ValueError(
            f"{key}: fingerprint={fingerprint!r} must be a text that changes when the data does; "
            "set self.fingerprint in the class"
        )


def _stores_of_folder(folder: Path, kind: ItemKind) -> list[ImageStore]:
    if (folder / METADATA).is_file():
        return [kind.folder(folder)]

    files = sorted(
        path for path in folder.iterdir() if path.suffix.lower() in kind.files and path.is_file()
    )
    # One kind only: of two it is unclear which order the rows have.
    suffixes = sorted({path.suffix.lower() for path in files})
    if len(suffixes) != 1:
        raise ValueError(
            f"{kind.key}={folder}: holds {' and '.join(suffixes) or 'none of them'}; "
            f"need {METADATA}, or files of one kind of {', '.join(kind.files)}"
        )

    return [kind.files[suffixes[0]](path) for path in files]


class StoredImages(ImageSource):
    """The images of one store after the other."""

    def __init__(self, name: str, stores: Sequence[ImageStore], *, images_per_item: int) -> None:
        self.name = name
        self.images_per_item = images_per_item
        self.captions = [caption for store in stores for caption in store.captions]
        # Stamps and not bytes: to read all images would take as long as to encode them.
        self.fingerprint = digest_of("\n".join(store.stamp for store in stores))
        self._stores = stores
        # _ends[i]: the rows of store i and all before it.
        self._ends = list(accumulate(len(store.captions) for store in stores))

    def __len__(self) -> int:
        return len(self.captions)

    def where(self, row: int) -> str:
        store, row = self._locate(row)
        return store.where(row)

    def pixels(self, row: int) -> np.ndarray:
        store, row = self._locate(row)
        return decode(store.read(row), where=store.where(row))

    def _locate(self, row: int) -> tuple[ImageStore, int]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)} images")
        number = bisect_right(self._ends, row)
        store = self._stores[number]
        return store, row - self._ends[number] + len(store.captions)


def read_ahead(executor: Executor, calls: Iterable[Callable[[], T]], *, depth: int) -> Iterator[T]:
    """Yield the value of each call, in order. At most `depth` calls run ahead of the reader.

    The executor is shut down at the end.
    """
    begun: deque[Future[T]] = deque()  # not Executor.map: that begins all calls at once
    try:
        for call in calls:
            begun.append(executor.submit(call))
            if len(begun) > depth:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()
    finally:
        executor.shutdown(wait=True, cancel_futures=True)
