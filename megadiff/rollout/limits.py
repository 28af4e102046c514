"""The bounds of what a replica accepts."""

from __future__ import annotations

from dataclasses import dataclass

REQUEST_BYTES = (
    2**16
)  # of JSON besides a first frame: texts of 4 bytes a character come as 12, the samples' indices


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Upper bounds; side in pixels, pixels of one sample's frames, prompt_chars in characters,
    bodies in bytes.

    image_*: of the OpenAI images API; pixels of all images of a request, work in pixels × steps.
    """

    group_size: int = 1024
    batch_size: int = 1024  # samples of one call
    side: int = 4096
    num_frames: int = 1024
    pixels: int = 2**29
    num_inference_steps: int = 1000
    prompt_chars: int = 2000
    json_bytes: int = 64 * 2**20  # 40 first frames of 480x832
    bucket_bytes: int = 8 * 2**30
    images: int = 10
    image_pixels: int = 2**24
    image_steps: int = 200
    image_work: int = 2**31  # 10 images of 1024x1024 with 200 steps
    image_calls: int = 64  # at a time, waiting ones included
    image_json_bytes: int = 2**16
    image_answer_s: float = 300.0  # from the request to its answer, the queue included

    def num_first_frames(self, *, height: int, width: int) -> int:
        """How many requests that bring a first frame one call may hold."""
        return self.json_bytes // (4 * height * width + REQUEST_BYTES)  # base64 of 3 bytes is 4
