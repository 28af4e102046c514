"""Draw images of the shapes world: data.images=examples.shapes.images:ShapesImages:60000."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from examples.shapes.world import make_chunk
from megadiff.data.images import MAX_WORKERS, Block, ImageSource, read_ahead
from megadiff.data.pixels import fit, is_enlarged
from megadiff.data.prompts import digest_of
from megadiff.process.workers import share_of_cores, worker_pool

CHUNK = 500  # images that share a random generator: another number gives other images
CHUNKS_PER_WORKER = 4  # 0.5 s of work; a process takes about as long to start


class ShapesImages(ImageSource):
    """COUNT or COUNT:SEED images, drawn when they are read. Row i depends on (seed, i) alone."""

    def __init__(self, count: str, seed: str = "", *, run_seed: int) -> None:
        """Take the run's seed where none is given. Raises ValueError for what is no number."""
        self._count = _number("COUNT", count)
        self._seed = _number("SEED", seed) if seed else run_seed
        if self._count < 1:
            raise ValueError(f"{count} images, need at least 1")

    @property
    def fingerprint(self) -> str:
        """Hash the first images: they change with the generator, and with what it draws with."""
        pixels, captions = self._chunk(0)
        first_images = f"{hashlib.blake2b(pixels).hexdigest()} {captions}"
        return digest_of(f"{self._count} {self._seed} {first_images}")

    def __len__(self) -> int:
        return self._count

    def pixels(self, row: int) -> np.ndarray:
        return self._chunk(row // CHUNK)[0][row % CHUNK]

    def blocks(
        self, start: int, stop: int, *, size: int, height: int, width: int
    ) -> Iterator[Block]:
        numbers = range(start // CHUNK, -(-stop // CHUNK))
        for number, (pixels, captions) in zip(numbers, self._chunks(numbers), strict=True):
            first_row = number * CHUNK
            rows = range(max(start - first_row, 0), min(stop - first_row, CHUNK))
            for block_start in rows[::size]:
                part = slice(block_start, min(block_start + size, rows.stop))
                fitted = [fit(image, height, width) for image in pixels[part]]
                # All images have one size, so all of them are enlarged, or none.
                all_enlarged = is_enlarged(pixels[0], height, width)
                yield Block(
                    pixels_BHWC=np.stack(fitted),
                    captions=captions[part],
                    num_enlarged=len(fitted) * all_enlarged,
                )

    def _chunks(self, numbers: range) -> Iterator[tuple[np.ndarray, list[str]]]:
        num_workers = min(share_of_cores(MAX_WORKERS), len(numbers) // CHUNKS_PER_WORKER)
        if num_workers < 2:
            return map(self._chunk, numbers)
        calls = map(self._chunk_call, numbers)
        return read_ahead(worker_pool(num_workers), calls, depth=2 * num_workers)

    def _chunk(self, number: int) -> tuple[np.ndarray, list[str]]:
        return self._chunk_call(number)()

    def _chunk_call(self, number: int) -> Callable[[], tuple[np.ndarray, list[str]]]:
        # Workers unpickle the name of this function and import its module: one without torch.
        return partial(make_chunk, self._seed, number, min(CHUNK, self._count - number * CHUNK))


def _number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{name}={text!r} must be a whole number; say e.g. ShapesImages:60000:11")
    return int(text)
