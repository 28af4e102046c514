"""frame: any reward of images on the frames of a video."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from megadiff.config.schema import RewardConfig
from megadiff.rewards.base import Reward, RewardSample, build_reward
from megadiff.rewards.score import score_checked
from megadiff.types import Prompt

REDUCE: dict[str, Callable[..., np.ndarray]] = {"mean": np.mean, "min": np.min}
PLACES: dict[
    str, Callable[[int], list[int]]
] = {  # of F frames, the indices of those that are scored
    "first": lambda count: [0],
    "middle": lambda count: [count // 2],
    "last": lambda count: [count - 1],
    "all": lambda count: list(range(count)),
}


class FrameReward(Reward):
    """The mean (or with reduce=min the worst) of another reward over frames of the video, each scored as an image.

    reward, args: the other reward, as `reward.<name>.type` and `.args` in a config. frames: first, middle, last, all, or
    how many, evenly spaced with the first and the last among them. An image is a video of one frame. A call of the
    other reward gets the same frame of several samples, so one that compares the samples of a group does so moment by
    moment. Slow rewards want few frames: reading text takes 0.1 s a frame.
    """

    def __init__(
        self,
        *,
        reward: str,
        args: Mapping[str, object] | None = None,
        frames: str | int = "all",
        reduce: str = "mean",
    ) -> None:
        if frames not in PLACES and (type(frames) is not int or frames < 1):
            raise ValueError(
                f"frames={frames!r}, must be {', '.join(PLACES)}, or a number of at least 1"
            )
        if reduce not in REDUCE:
            raise ValueError(f"reduce={reduce!r}, must be one of {', '.join(REDUCE)}")
        self.frames, self.reduce = frames, reduce
        self.inner = build_reward(reward, RewardConfig(type=reward, args=dict(args or {})))
        self.samples_per_call = self.inner.samples_per_call

    def score(self, samples: Sequence[RewardSample]) -> list[float]:
        lengths = sorted({len(sample.pixels) for sample in samples})
        if len(lengths) != 1:
            raise ValueError(
                f"the videos have {lengths} frames; those of one call must be equally long"
            )
        values_KN = [
            self._score_frame(samples, index) for index in frame_indices(lengths[0], self.frames)
        ]
        return REDUCE[self.reduce](np.array(values_KN), axis=0).tolist()

    def validate(self, prompts: Sequence[Prompt]) -> None:
        self.inner.validate(prompts)

    def close(self) -> None:
        self.inner.close()

    def _score_frame(self, samples: Sequence[RewardSample], index: int) -> list[float]:
        return score_checked(
            self.inner, [replace(each, pixels=each.pixels[index : index + 1]) for each in samples]
        )


def frame_indices(num_frames: int, frames: str | int) -> list[int]:
    """Rising and without doubles; frames: as of FrameReward. A single one of many is the middle one."""
    if isinstance(frames, str):
        return PLACES[frames](num_frames)
    if frames == 1:
        return PLACES["middle"](num_frames)
    return sorted(
        {round(place) for place in np.linspace(0, num_frames - 1, min(frames, num_frames)).tolist()}
    )
