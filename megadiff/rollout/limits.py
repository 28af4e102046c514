"""Bound what a replica accepts, and name what both ends of its routes must agree on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megadiff.types import ImageSize

# A request's JSON without its images: the texts and the samples' indices. JSON escapes a
# character of 4 bytes as 12.
REQUEST_BYTES = 2**16

RUN_HEADER = "x-megadiff-run"  # of every request that a run sends
RUN_CHARS = 128
# Of an answer with samples: how many others are waiting or in the engine, of all runs and ranks.
OUTSTANDING_HEADER = "x-megadiff-outstanding"
LARGEST_SCALE = 100  # of guidance, eta and temperature
LOCKED = 423  # the HTTP status of a weight push that may begin later
GROUP_BROKE = 424  # of a push: others of its process group did not come, or sent nothing
OWNER_SILENT_S = 60.0  # a run that is silent for longer may be gone: another run may begin a push


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Hold the upper bounds of requests.

    side is in pixels, pixels counts one sample's frames, prompt_chars is in characters, bodies are
    in bytes. image_* are for the OpenAI images API: image_pixels counts all images of a request,
    image_work is pixels × steps.
    """

    group_size: int = 1024
    batch_size: int = 1024  # samples of one call
    side: int = 4096
    num_frames: int = 1024
    pixels: int = 2**29
    num_inference_steps: int = 1000
    prompt_chars: int = 2000
    given_images: int = 16  # of one request
    json_bytes: int = 64 * 2**20  # 40 given images of 480x832
    think_tokens: int = 4096
    bucket_bytes: int = 8 * 2**30
    images: int = 10
    image_pixels: int = 2**24
    image_steps: int = 200
    image_work: int = 2**31  # 10 images of 1024x1024 with 200 steps
    image_calls: int = 64  # at a time, waiting ones included
    image_json_bytes: int = 2**16
    image_answer_s: float = 300.0  # from the request to its answer, the queue included

    def num_requests(self, images: Sequence[ImageSize]) -> int:
        """Return how many requests, each with images of these sizes, the body of one call holds."""
        # base64 turns a pixel's 3 bytes into 4
        num_pixels = sum(height * width for height, width in images)
        return self.json_bytes // (4 * num_pixels + REQUEST_BYTES)
