"""Reward jpeg_size: score how well an image compresses, or how badly.

After DDPO, arXiv 2305.13301, section 5.1.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from PIL import Image

from megadiff.rewards.base import Reward, RewardSample

# Uniform noise, the least compressible image, takes 1.2 to 1.3 bytes a pixel at quality 95
# (measured at 64 and 512 pixels a side).
MAX_BYTES_PER_PIXEL = 1.5


class JpegSizeReward(Reward):
    """Score 1 − fraction, with fraction = size_kib / (H · W · 1.5 / 1024), clipped to [0, 1].

    The mean over frames. sign: 1 as above, compressible images win; -1 scores fraction, detailed
    images win. quality: JPEG quality, 1 to 95.
    Relative to the pixel count, so that one weight fits every resolution. A flat 512×512 image
    scores 0.99, noise 0.2. The header of 0.6 KiB weighs 0.1 at 64×64.
    """

    def __init__(self, *, sign: int = 1, quality: int = 95) -> None:
        if sign not in (1, -1):
            raise ValueError(f"sign={sign}, must be 1 (small files win) or -1 (large files win)")
        # Pillow advises against more than 95: files grow large with hardly any gain.
        if not 1 <= quality <= 95:
            raise ValueError(f"quality={quality} is outside 1..95; 95 is the default")
        self.sign = sign
        self.quality = quality

    def score(self, samples: Sequence[RewardSample]) -> list[float]:
        return [self._score_frames(sample.pixels) for sample in samples]

    def _score_frames(self, pixels: np.ndarray) -> float:
        num_frames, height, width, _ = pixels.shape
        max_kib = height * width * MAX_BYTES_PER_PIXEL / 1024
        total_kib = sum(jpeg_kib(frame, quality=self.quality) for frame in pixels)
        fraction = total_kib / num_frames / max_kib
        return min(1.0, max(0.0, 1.0 - fraction if self.sign == 1 else fraction))


def jpeg_kib(pixels: np.ndarray, *, quality: int) -> float:
    """Return the KiB of a frame's JPEG. pixels: [H, W, 3] uint8 RGB."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=quality)
    return buffer.tell() / 1024
