"""Captioned images for supervised training: from files, or from the generator of shapes."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np

from megadiff.data.generator import make_chunk
from megadiff.data.pixels import decode, fit, is_enlarged
from megadiff.data.shelves import METADATA, SHELVES, FolderShelf, Shelf
from megadiff.process.workers import share_of_cores, worker_pool

T = TypeVar("T")

GENERATED = "shapes:"
CHUNK = 500  # generated images that share a seed
CHUNKS_PER_WORKER = 4  # 0.5 s of work; a process takes about as long to start
MAX_WORKERS = 16


@dataclass(frozen=True, kw_only=True)
class Block:
    """Consecutive rows. pixels_BHWC: uint8 RGB. captions: B of them. num_enlarged: see pixels.is_enlarged."""

    pixels_BHWC: np.ndarray
    captions: Sequence[str]
    num_enlarged: int


class ImageSource(Protocol):
    """A sequence of captioned images; row i is the same in every process.

    name: as configured. fingerprint: changes when the data does. captions: of all rows, where they are stored; the
    generator's come with its images, and this is empty.
    """

    name: str
    captions: Sequence[str]

    @property
    def fingerprint(self) -> str: ...

    def __len__(self) -> int: ...

    def where(self, row: int) -> str:
        """Names a row in errors."""

    def pixels(self, row: int) -> np.ndarray:
        """uint8 [H, W, 3] RGB, in the size it is stored in. ValueError, with its place, if it cannot be read."""

    def blocks(
        self, start: int, stop: int, *, size: int, height: int, width: int
    ) -> Iterator[Block]:
        """Rows start … stop−1 in order, fitted to height × width, at most `size` a block, read ahead by workers."""


def open_images(source: str, *, seed: int) -> ImageSource:
    """The images that data.images names. Files are indexed (captions, places) but no image is read.

    A folder with metadata.jsonl; a .parquet or .tar file; a folder that holds files of one of these kinds, taken in the
    order of their names; or shapes:COUNT, shapes:COUNT:SEED (without SEED: `seed`, the run's).
    ValueError: none of these, no images at all, or a file that is not as megadiff.data.shelves says.
    """
    if source.startswith(GENERATED):
        return _open_generated(source, seed)
    path = Path(source)
    if path.is_dir():
        shelves = _shelves_of_folder(path)
    elif not path.exists():
        raise ValueError(
            f"data.images={source}: no such file or folder; give a folder, .parquet, .tar or shapes:COUNT"
        )
    elif path.suffix.lower() not in SHELVES:
        raise ValueError(
            f"data.images={source}: unknown suffix {path.suffix!r}; known: {', '.join(SHELVES)}, or a folder"
        )
    else:
        shelves = [SHELVES[path.suffix.lower()](path)]
    images = StoredImages(source, shelves)
    if not len(images):
        raise ValueError(f"data.images={source}: holds 0 captioned images, need at least 1")
    return images


def _shelves_of_folder(folder: Path) -> list[Shelf]:
    if (folder / METADATA).is_file():
        return [FolderShelf(folder)]
    files = sorted(
        path for path in folder.iterdir() if path.suffix.lower() in SHELVES and path.is_file()
    )
    suffixes = sorted({path.suffix.lower() for path in files})
    if len(suffixes) != 1:
        found = " and ".join(suffixes) if suffixes else "none of them"
        raise ValueError(
            f"data.images={folder}: holds {found}; need {METADATA}, or files of one kind of {', '.join(SHELVES)}"
        )
    return [SHELVES[suffixes[0]](path) for path in files]


class StoredImages:
    """Fulfils ImageSource: the images of one shelf after the other."""

    def __init__(self, name: str, shelves: Sequence[Shelf]) -> None:
        self.name = name
        self.captions = [caption for shelf in shelves for caption in shelf.captions]
        self.fingerprint = _hash("\n".join(shelf.stamp for shelf in shelves))
        self._shelves = shelves
        self._ends = list(accumulate(len(shelf.captions) for shelf in shelves))

    def __len__(self) -> int:
        return len(self.captions)

    def where(self, row: int) -> str:
        shelf, row = self._locate(row)
        return shelf.where(row)

    def pixels(self, row: int) -> np.ndarray:
        shelf, row = self._locate(row)
        return decode(shelf.read(row), where=shelf.where(row))

    def blocks(
        self, start: int, stop: int, *, size: int, height: int, width: int
    ) -> Iterator[Block]:
        def fitted(row: int) -> tuple[np.ndarray, bool]:
            pixels = self.pixels(row)
            return fit(pixels, height, width), is_enlarged(pixels, height, width)

        # Threads: reading, decoding and resampling leave the interpreter lock
        calls = (partial(fitted, row) for row in range(start, stop))
        images = _ahead(ThreadPoolExecutor(share_of_cores(MAX_WORKERS)), calls, depth=2 * size)
        while rows := list(islice(images, size)):
            yield Block(
                pixels_BHWC=np.stack([pixels for pixels, _ in rows]),
                captions=self.captions[start : start + len(rows)],
                num_enlarged=sum(enlarged for _, enlarged in rows),
            )
            start += len(rows)

    def _locate(self, row: int) -> tuple[Shelf, int]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)} images")
        number = bisect_right(self._ends, row)
        return self._shelves[number], row - (self._ends[number - 1] if number else 0)


class GeneratedImages:
    """Fulfils ImageSource: COUNT images of examples.shapes, made when they are read. Row i depends on (seed, i) alone."""

    captions = ()

    def __init__(self, name: str, *, count: int, seed: int) -> None:
        self.name, self._count, self._seed = name, count, seed

    @property
    def fingerprint(self) -> str:
        """Of the first images: another version of the generator, or of what it draws with, gives another."""
        pixels, captions = self._chunk(0)
        return _hash(f"{self._count} {self._seed} {hashlib.blake2b(pixels).hexdigest()} {captions}")

    def __len__(self) -> int:
        return self._count

    def where(self, row: int) -> str:
        return f"{self.name}: image {row}"

    def pixels(self, row: int) -> np.ndarray:
        return self._chunk(row // CHUNK)[0][row % CHUNK]

    def blocks(
        self, start: int, stop: int, *, size: int, height: int, width: int
    ) -> Iterator[Block]:
        first, last = start // CHUNK, -(-stop // CHUNK)
        for number, (pixels, captions) in enumerate(self._chunks(range(first, last)), start=first):
            rows = range(max(start - number * CHUNK, 0), min(stop - number * CHUNK, CHUNK))
            for at in rows[::size]:
                part = slice(at, min(at + size, rows.stop))
                num_enlarged = len(pixels[part]) if is_enlarged(pixels[0], height, width) else 0
                fitted = _fit_all(pixels[part], height, width)
                yield Block(pixels_BHWC=fitted, captions=captions[part], num_enlarged=num_enlarged)

    def _chunks(self, numbers: range) -> Iterator[tuple[np.ndarray, list[str]]]:
        num_workers = min(share_of_cores(MAX_WORKERS), len(numbers) // CHUNKS_PER_WORKER)
        if num_workers < 2:
            yield from map(self._chunk, numbers)
            return
        yield from _ahead(
            worker_pool(num_workers), map(self._chunk_call, numbers), depth=2 * num_workers
        )

    def _chunk(self, number: int) -> tuple[np.ndarray, list[str]]:
        return self._chunk_call(number)()

    def _chunk_call(self, number: int) -> Callable[[], tuple[np.ndarray, list[str]]]:
        return partial(make_chunk, self._seed, number, min(CHUNK, self._count - number * CHUNK))


def _open_generated(source: str, seed: int) -> GeneratedImages:
    numbers = source.removeprefix(GENERATED).split(":")
    if not (
        1 <= len(numbers) <= 2 and all(number.isascii() and number.isdigit() for number in numbers)
    ):
        raise ValueError(
            f"data.images={source}: must be shapes:COUNT or shapes:COUNT:SEED, e.g. shapes:60000"
        )
    if int(numbers[0]) < 1:
        raise ValueError(f"data.images={source}: {numbers[0]} images, need at least 1")
    return GeneratedImages(
        source, count=int(numbers[0]), seed=int(numbers[1]) if len(numbers) == 2 else seed
    )


def _fit_all(pixels_BHWC: np.ndarray, height: int, width: int) -> np.ndarray:
    if pixels_BHWC.shape[1:3] == (height, width):
        return pixels_BHWC
    return np.stack([fit(pixels, height, width) for pixels in pixels_BHWC])


def _ahead(executor: Executor, calls: Iterable[Callable[[], T]], *, depth: int) -> Iterator[T]:
    """The value of each call, in order, with at most `depth` of them begun ahead of the reader. Ends the executor."""
    begun: deque[Future[T]] = deque()
    try:
        for call in calls:
            begun.append(executor.submit(call))
            if len(begun) > depth:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
