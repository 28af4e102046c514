"""Reward frame: apply any reward of images to the frames of a video."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from megadiff.config.rewards import RewardConfig
from megadiff.rewards.answers import score_checked
from megadiff.rewards.base import Reward, RewardSample, build_reward

REDUCE: dict[str, Callable[..., np.ndarray]] = {"mean": np.mean, "min": np.min}
# The number of frames → the indices of those that are scored.
FRAMES: dict[str, Callable[[int], list[int]]] = {
    "first": lambda count: [0],
    "middle": lambda count: [count // 2],
    "last": lambda count: [count - 1],
    "all": lambda count: list(range(count)),
}


class FrameReward(Reward):
    """Average another reward over frames of the video, each scored as an image.

    reward, args: the other reward, as `reward.<name>.type` and `.args` in a config.
    frames: first, middle, last, all, or how many, evenly spaced with the first and the last among
    them. Slow rewards want few: reading text takes 0.1 s a frame. An image is a video of one frame.
    reduce: mean, or min for the worst frame.
    A call of the other reward gets the same frame of several samples, so one that compares the
    samples of a group does so moment by moment.
    """

    def __init__(
        self,
        *,
        reward: str,
        args: Mapping[str, object] | None = None,
        frames: str | int = "all",
        reduce: str = "mean",
    ) -> None:
        if frames not in FRAMES and (type(frames) is not int or frames < 1):
            raise ValueError(
                f"frames={frames!r}, must be {', '.join(FRAMES)}, or a number of at least 1"
            )
        if reduce not in REDUCE:
            raise ValueError(f"reduce={reduce!r}, must be one of {', '.join(REDUCE)}")

        self.frames = frames
        self.reduce = reduce
        # timeout_s is of this reward's calls, against which its deadline_s is checked, too
        config = RewardConfig(type=reward, args=dict(args or {}), timeout_s=math.inf)
        self.inner = build_reward(reward, config)
        # So that a reward that compares a group still gets the whole group.
        self.samples_per_call = self.inner.samples_per_call
        self.workers = self.inner.workers
        # The first frame that it gives up is the last one asked about.
        self.deadline_s = self.inner.deadline_s
        for deed in ("open", "sleep", "wake", "figures", "validate", "close"):
            setattr(self, deed, getattr(self.inner, deed))

    def score(self, samples: Sequence[RewardSample]) -> list[float | None]:
        lengths = sorted({len(sample.pixels) for sample in samples})
        if len(lengths) != 1:
            raise ValueError(
                f"the videos have {lengths} frames; those of one call must be equally long"
            )
        indices = frame_indices(lengths[0], self.frames)
        values_KN = [self._score_frame(samples, index) for index in indices]
        values_N = REDUCE[self.reduce](np.array(values_KN), axis=0).tolist()
        # a video with a frame that could not be scored cannot be, either
        return [None if math.isnan(value) else value for value in values_N]

    def _score_frame(self, samples: Sequence[RewardSample], index: int) -> list[float]:
        images = [replace(sample, pixels=sample.pixels[index : index + 1]) for sample in samples]
        return score_checked(self.inner, images)


def frame_indices(num_frames: int, frames: str | int) -> list[int]:
    """Return indices, rising and without doubles. frames: as of FrameReward.

    A single frame is the middle one.
    """
    if isinstance(frames, str):
        return FRAMES[frames](num_frames)
    if frames == 1:
        return FRAMES["middle"](num_frames)
    positions = np.linspace(0, num_frames - 1, min(frames, num_frames)).tolist()
    return sorted({round(position) for position in positions})
