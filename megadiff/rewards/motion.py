"""motion: does the video move, and not too much. temporal_consistency: do its frames follow from each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

import cv2
import numpy as np

from megadiff.rewards.base import Reward, RewardSample
from megadiff.rewards.flow import checked_pairs, neighbours, optical_flow


class MotionReward(Reward):
    """1 while the mean optical flow lies within [low, high]; below low it is flow / low, above high it is high / flow.

    Flow is measured from each frame to the next, as a share of the frame's shorter side: at 0.01 and 16 frames/s the
    picture moves by a sixth of its height in a second. So one band fits every resolution, a still video is 0, and there is
    no plateau outside of the band. pairs: how many pairs of neighbours are looked at, evenly spaced; 0: all.
    Frames of noise "move" too: combine it with temporal_consistency.
    """

    samples_per_call = 1  # of long videos a tenth of a second each: spread over the workers

    def __init__(self, *, low: float = 0.005, high: float = 0.03, pairs: int = 16) -> None:
        if not 0 < low <= high or not math.isfinite(high):
            raise ValueError(
                f"low={low}, high={high}: a band needs 0 < low ≤ high, in shares of the frame's side"
            )
        self.low, self.high, self.pairs = low, high, checked_pairs(pairs)

    def score(self, samples: Sequence[RewardSample]) -> list[float]:
        return [self._in_band(mean_flow(sample, pairs=self.pairs)) for sample in samples]

    def _in_band(self, flow: float) -> float:
        if flow < self.low:
            return flow / self.low
        return min(1.0, self.high / flow)


class TemporalConsistencyReward(Reward):
    """1 / (1 + error / tolerance): how well each frame follows from the one before by motion alone.

    error: mean difference between a frame and the next one moved back along their optical flow, in levels of 255, where
    the flow stays inside the picture. So flicker, cuts and noise cost, movement does not; a still video is 1, so combine
    it with motion. tolerance: the error at which the reward is 0.5. pairs: as in motion.
    """

    samples_per_call = 1

    def __init__(self, *, tolerance: float = 8.0, pairs: int = 16) -> None:
        if not 0 < tolerance <= 255:
            raise ValueError(f"tolerance={tolerance} is outside 0..255 levels; 8 is the default")
        self.tolerance, self.pairs = tolerance, checked_pairs(pairs)

    def score(self, samples: Sequence[RewardSample]) -> list[float]:
        return [
            1 / (1 + warp_error(sample, pairs=self.pairs) / self.tolerance) for sample in samples
        ]


def mean_flow(sample: RewardSample, *, pairs: int) -> float:
    """Mean length of the flow from frame to frame, as a share of the shorter side."""
    lengths = []
    for frame, following in neighbours(sample, pairs):
        flow_HW2 = optical_flow(frame, following)
        lengths.append(float(np.linalg.norm(flow_HW2, axis=-1).mean()) / min(frame.shape))
    return fmean(lengths)


def warp_error(sample: RewardSample, *, pairs: int) -> float:
    """Mean absolute difference, in levels of 255, between frames and their successors moved back along the flow."""
    return fmean([_pair_error(frame, following) for frame, following in neighbours(sample, pairs)])


def _pair_error(frame: np.ndarray, following: np.ndarray) -> float:
    height, width = frame.shape
    places_HW2 = optical_flow(frame, following) + np.dstack(
        np.meshgrid(np.arange(width), np.arange(height))
    )
    places_HW2 = places_HW2.astype(np.float32)
    is_inside = (places_HW2 >= 0).all(axis=-1) & (places_HW2 <= (width - 1, height - 1)).all(
        axis=-1
    )
    moved_back = cv2.remap(
        following, places_HW2, None, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE
    )
    difference = np.abs(moved_back.astype(np.float32) - frame)
    return float(difference[is_inside].mean() if is_inside.any() else difference.mean())
