"""Count a transformer's tokens, and size a replica's calls of its VAE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TokenCount:
    """Count the tokens of one forward of one sample.

    is_modulated: whether each token has a timestep of its own.
    """

    image: int
    text: int
    is_modulated: bool = False


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """Size the VAE's calls, by which a replica turns latents into pixels.

    pixels: kind of device → the most pixels of a call, over all samples and frames.
    bytes_per_pixel: the decoder's bfloat16 activations for a pixel, in however many frames.
    bytes_per_frame: the same pixel in each frame of the video that grows.
    """

    pixels: Mapping[str, int]
    bytes_per_pixel: int
    bytes_per_frame: int = 0

    def num_rows(self, device: str, *, num_frames: int, height: int, width: int) -> int:
        """Return how many samples a call decodes, at least one."""
        return max(1, self.pixels[device] // (num_frames * height * width))

    def num_bytes(
        self, rows: int, *, num_frames: int, height: int, width: int, itemsize: int
    ) -> int:
        """Estimate the bytes beside the decoder's weights while a GPU decodes this many samples."""
        # more samples than a call decodes come in several calls, one after another
        rows = min(rows, self.num_rows("cuda", num_frames=num_frames, height=height, width=width))
        per_pixel = self.bytes_per_pixel + self.bytes_per_frame * num_frames
        # all figures are for bfloat16, of 2 bytes a number
        return height * width * rows * per_pixel * itemsize // 2
