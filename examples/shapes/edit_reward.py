"""Score whether an edit of examples.shapes.edits was done, and nothing else changed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import cv2
import numpy as np

from examples.shapes.edits import mask_of, wanted
from examples.shapes.verifier import Detection, detect
from examples.shapes.world import SIZE, Scene, SceneObject, draw
from megadiff.rewards.base import Reward, RewardSample
from megadiff.rewards.color import oklab
from megadiff.types import Prompt

MOST_SHIFT = 3.0  # pixels by which an object's centre may move, of a picture of 64


class ShapesEditReward(Reward):
    """Score 1 for exactly the edit that is asked for, else at most 0.5.

    Half of it is closeness(): partial credit for every pixel that comes nearer. The other half is
    for a picture in which every object is in its place, in its shape and in the colour it should
    have, and nothing else is.
    """

    def score(self, samples: Sequence[RewardSample]) -> list[float]:
        scores = []
        for sample in samples:
            scene, index = wanted(sample.prompt)
            values = [self._value(frame, scene, index) for frame in sample.pixels]
            scores.append(sum(values) / len(values))
        return scores

    def validate(self, prompts: Sequence[Prompt]) -> None:
        for prompt in prompts:
            wanted(prompt)

    def _value(self, pixels: np.ndarray, scene: Scene, index: int) -> float:
        return 0.5 * is_exact(pixels, scene) + 0.5 * closeness(pixels, scene, index)


class ShapesEditStrictReward(ShapesEditReward):
    """Score 1 for exactly the edit that is asked for, else 0."""

    def _value(self, pixels: np.ndarray, scene: Scene, index: int) -> float:
        return float(is_exact(pixels, scene))


def closeness(pixels: np.ndarray, scene: Scene, index: int) -> float:
    """Return in [0, 1] how near a picture is to the wanted scene, 1 for equal pixels.

    1 − mean distance in OKLab, half for the changed object's pixels and half for all others: the
    object is small, and leaving the picture as it was must not be worth much.
    pixels: uint8 [H, W, 3] of any size.
    """
    seen = cv2.resize(pixels, (SIZE, SIZE), interpolation=cv2.INTER_AREA)
    offsets = oklab(seen.reshape(-1, 3)) - oklab(draw(scene).reshape(-1, 3))
    distances = np.sqrt(np.square(offsets).sum(axis=1))
    inside = mask_of(scene, index).reshape(-1)
    inner = float(np.average(distances, weights=inside))
    outer = float(np.average(distances, weights=1 - inside))
    return max(0.0, 1.0 - (inner + outer) / 2)


def is_exact(pixels: np.ndarray, scene: Scene) -> bool:
    """Tell whether a picture shows the scene's objects where they are, and nothing else."""
    blobs = detect(pixels)
    zoom = max(pixels.shape[:2]) / SIZE
    free = list(blobs)
    for item in scene.objects:
        match = next((blob for blob in free if _is_same(blob, item, zoom)), None)
        if match is None:
            return False
        free.remove(match)
    return not free


def _is_same(blob: Detection, item: SceneObject, zoom: float) -> bool:
    # a triangle's centroid is not its centre: the distance allows for that
    shift = math.hypot(blob.x / zoom - item.x, blob.y / zoom - item.y)
    return (blob.color, blob.shape) == (item.color, item.shape) and shift <= MOST_SHIFT
