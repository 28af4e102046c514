"""Measure where the pixels of a frame go in the next one, by OpenCV's optical flow (5.0)."""

from __future__ import annotations

from collections.abc import Iterable

import cv2
import numpy as np

from megadiff.rewards.base import RewardSample

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
