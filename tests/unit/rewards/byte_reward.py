"""A reward whose score depends on every byte that it is shown, for `megadiff score` in a test."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from megadiff.rewards.base import Reward, RewardContext, RewardSample


class ByteReward(Reward):
    """Score by a hash of pixels, prompt, its images, columns and index."""

    samples_per_call = 3
    workers = 2

    def __init__(self, *, refused: str = "") -> None:
        self.refused = refused
        self.opened = False

    def open(self, context: RewardContext) -> None:
        self.opened = True

    def score(self, samples: Sequence[RewardSample]) -> list[float]:
        assert self.opened and len(samples) <= self.samples_per_call
        return [self._score(sample) for sample in samples]

    def _score(self, sample: RewardSample) -> float:
        if sample.prompt.text == self.refused:
            raise ValueError(f"the prompt {sample.prompt.text!r} cannot be scored")
        prompt = sample.prompt
        rest = [
            prompt.text,
            prompt.negative_text,
            prompt.id,
            dict(prompt.fields),
            sample.sample_index,
            [Path(file).read_bytes().hex() for file in prompt.images],
        ]
        shape = repr((sample.pixels.dtype, sample.pixels.shape)).encode()
        text = json.dumps(rest, sort_keys=True).encode()
        digest = hashlib.sha256(shape + sample.pixels.tobytes() + text).digest()
        return int.from_bytes(digest[:6], "big") / 2**48
