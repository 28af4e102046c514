"""shapes and shapes_strict: does the image show what its caption, one of megadiff.shapes.world, asks for."""

from __future__ import annotations

from collections.abc import Sequence

from megadiff.rewards.base import Reward, RewardSample
from megadiff.shapes.verifier import Verdict, verify
from megadiff.shapes.world import parse
from megadiff.types import Prompt


class ShapesReward(Reward):
    """In [0, 1], mean over frames: 1 for exactly what the caption asks for, else at most 0.5, with credit for each
    object that is right in shape or colour. See megadiff.shapes.verifier."""

    def score(self, samples: Sequence[RewardSample]) -> list[float]:
        return [self._score_frames(sample) for sample in samples]

    def validate(self, prompts: Sequence[Prompt]) -> None:
        for prompt in prompts:
            parse(prompt.text)

    def _score_frames(self, sample: RewardSample) -> float:
        caption = parse(sample.prompt.text)
        return sum(self._value(verify(frame, caption)) for frame in sample.pixels) / len(sample.pixels)

    def _value(self, verdict: Verdict) -> float:
        return verdict.dense


class ShapesStrictReward(ShapesReward):
    """1 for exactly what the caption asks for and nothing else, else 0; mean over frames. Its mean is the accuracy."""

    def _value(self, verdict: Verdict) -> float:
        return float(verdict.strict)
