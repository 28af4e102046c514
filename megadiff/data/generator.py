"""What the worker processes of GeneratedImages run. Imports neither torch nor other parts of us, which take seconds."""

from __future__ import annotations

import hashlib

import numpy as np

from examples.shapes.world import sample_images


def make_chunk(seed: int, number: int, count: int) -> tuple[np.ndarray, list[str]]:
    """Chunk `number` of the images of a seed: uint8 [count, 64, 64, 3] RGB, and captions. Fewer are the first of more."""
    digest = hashlib.blake2b(f"images/{seed}/{number}".encode(), digest_size=8).digest()
    return sample_images(count, seed=int.from_bytes(digest, "little"), num_workers=1)
