"""The bounds of what a replica accepts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Upper bounds; side in pixels, pixels of one sample's frames, prompt_chars in characters, bodies in bytes."""

    group_size: int = 1024
    batch_size: int = 1024  # samples of one call
    side: int = 4096
    num_frames: int = 1024
    pixels: int = 2**29
    num_inference_steps: int = 1000
    prompt_chars: int = 2000
    json_bytes: int = 16 * 2**20
    bucket_bytes: int = 8 * 2**30
