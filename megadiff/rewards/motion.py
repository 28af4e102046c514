"""Score a video: motion (it moves, but not too much), temporal_consistency (it has no cuts).

By OpenCV's optical flow (5.0), which says where the pixels of a frame go in the next one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import starmap
from statistics import fmean

import cv2
import numpy as np

from megadiff.rewards.base import Reward, RewardSample

# Frames are shrunk to so many pixels. With more, the flow of smooth surfaces comes out too short
# (at 128 by a third).
SHORT_SIDE = 64
# Farneback's pyramid follows movements of up to about a fifth of the frame's side.
LEVELS = 4
WINDOW = 15
ITERATIONS = 3
# Its polynomials, as their authors pair the two numbers.
NEIGHBOURHOOD = 5
SMOOTHING = 1.1


class MotionReward(Reward):
    """Score 1 while the mean optical flow lies in [low, high], else flow / low or high / flow.

    Flow is measured from each frame to the next, as a fraction of the frame's shorter side, so one
    band fits every resolution. At 0.01 and 16 frames/s the picture moves by a sixth of its height
    in a second. A still video is 0, and there is no plateau outside of the band.
    pairs: how many pairs of neighbours are looked at, evenly spaced; 0 for all.
    Frames of noise "move" too: combine it with temporal_consistency.
    """

    samples_per_call = 1  # a long video takes a tenth of a second: spread over the workers

    def __init__(self, *, low: float = 0.005, high: float = 0.03, pairs: int = 16) -> None:
        if not 0 < low <= high or not math.isfinite(high):
            raise ValueError(
                f"low={low}, high={high}: a band needs 0 < low ≤ high, in fractions of the frame's "
                "side"
            )
        self.low = low
        self.high = high
        self.pairs = checked_pairs(pairs)

    def score(self, samples: Sequence[RewardSample]) -> list[float]:
        return [self._in_band(mean_flow(sample, pairs=self.pairs)) for sample in samples]

    def _in_band(self, flow: float) -> float:
        if flow < self.low:
            return flow / self.low
        return min(1.0, self.high / flow)


class TemporalConsistencyReward(Reward):
    """Score 1 / (1 + error / tolerance): frames should follow from each other by motion alone.

    error: mean difference between a frame and the next one moved back along their optical flow, in
    levels of 255, where the flow stays inside the picture. Flicker, cuts and noise cost, movement
    does not. A still video is 1, so combine it with motion.
    tolerance: the error at which the reward is 0.5. pairs: as in motion.
    """

    samples_per_call = 1

    def __init__(self, *, tolerance: float = 8.0, pairs: int = 16) -> None:
        if not 0 < tolerance <= 255:
            raise ValueError(f"tolerance={tolerance} is outside 0..255 levels; 8 is the default")
        self.tolerance = tolerance
        self.pairs = checked_pairs(pairs)

    def score(self, samples: Sequence[RewardSample]) -> list[float]:
        rewards = []
        for sample in samples:
            error = fmean(starmap(_pair_error, neighbours(sample, self.pairs)))
            rewards.append(1 / (1 + error / self.tolerance))
        return rewards


def mean_flow(sample: RewardSample, *, pairs: int) -> float:
    """Return the mean length of the flow between frames, as a fraction of the shorter side."""
    lengths = []
    for frame, following in neighbours(sample, pairs):
        flow_HW2 = optical_flow(frame, following)
        lengths.append(float(np.linalg.norm(flow_HW2, axis=-1).mean()) / min(frame.shape))
    return fmean(lengths)


def _pair_error(frame: np.ndarray, following: np.ndarray) -> float:
    """Return the mean difference of a frame and the following one moved back, of 255 levels."""
    height, width = frame.shape
    grid_HW2 = np.dstack(np.meshgrid(np.arange(width), np.arange(height)))
    # cv2.remap takes its map in float32.
    target_HW2 = (optical_flow(frame, following) + grid_HW2).astype(np.float32)

    is_beyond_start = (target_HW2 >= 0).all(axis=-1)
    is_before_end = (target_HW2 <= (width - 1, height - 1)).all(axis=-1)
    # What flows in from outside of the picture has no predecessor to be compared with.
    is_inside = is_beyond_start & is_before_end

    moved_back = cv2.remap(  # type: ignore[call-overload]  # it does take None
        following, target_HW2, None, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE
    )
    difference = np.abs(moved_back.astype(np.float32) - frame)
    # Where no pixel stays inside, all count: the mean of none would be NaN.
    return float(difference[is_inside].mean() if is_inside.any() else difference.mean())


def neighbours(sample: RewardSample, num_pairs: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return pairs of consecutive frames, grey uint8 [h, w], evenly spaced over the video.

    num_pairs: 0 for all of them. Raises ValueError for a video of one frame.
    """
    count = len(sample.pixels) - 1
    if count < 1:
        raise ValueError(
            "motion needs at least 2 frames, found 1; set rollout.num_frames, or leave this reward "
            "out"
        )

    starts: Iterable[int] = range(count)
    if 0 < num_pairs < count:
        starts = sorted({round(start) for start in np.linspace(0, count - 1, num_pairs).tolist()})
    return [(grey(sample.pixels[start]), grey(sample.pixels[start + 1])) for start in starts]


def grey(pixels: np.ndarray) -> np.ndarray:
    """Return [H, W, 3] uint8 RGB as grey uint8 [h, w], the shorter side at most SHORT_SIDE."""
    frame = cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY)
    scale = SHORT_SIDE / min(frame.shape)
    if scale >= 1:
        return frame
    height, width = (max(1, round(side * scale)) for side in frame.shape)
    return cv2.resize(frame, (width, height), interpolation=cv2.INTER_AREA)


def optical_flow(frame: np.ndarray, following: np.ndarray) -> np.ndarray:
    """Return [h, w, 2] float32: how many pixels right and down each pixel lies in `following`.

    Both frames are grey uint8 [h, w]. Dense, by polynomial expansion (Farnebäck, 2003).
    """
    return cv2.calcOpticalFlowFarneback(  # type: ignore[call-overload]  # it does take None
        frame, following, None, 0.5, LEVELS, WINDOW, ITERATIONS, NEIGHBOURHOOD, SMOOTHING, 0
    )


def checked_pairs(num_pairs: int) -> int:
    """Return the number. Raises ValueError where it is no number of pairs."""
    if type(num_pairs) is not int or num_pairs < 0:
        raise ValueError(f"pairs={num_pairs!r}, must be a number of at least 1, or 0 for all")
    return num_pairs
