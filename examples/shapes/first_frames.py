"""Make first frames for image to video: shapes on a wide picture, and what should happen to them.

`python -m examples.shapes.first_frames assets/prompts/first_frames` writes prompt files and
pictures.
"""

from __future__ import annotations

import sys
from pathlib import Path

import cv2
import numpy as np

from examples.shapes.pictured_prompts import write_pictured_prompts
from examples.shapes.world import COLORS, SHAPES, fill_shape

SEED = 26
HEIGHT = 480
WIDTH = 832
RADIUS = (60, 110)  # least and largest, in pixels
MARGIN = 130  # of a shape's centre to the picture's edges
FILES = {"first_frames_rl.jsonl": 8, "first_frames_heldout.jsonl": 4}  # → pictures
SMALL = (cv2.IMWRITE_PNG_COMPRESSION, 9, cv2.IMWRITE_PNG_STRATEGY, 0)
MOTIONS = (
    "the {object} moves slowly to the left",
    "the {object} falls out of the picture",
    "the {object} grows while it turns",
    "the camera pulls back from the {object}",
)


def write_first_frames(folder: Path) -> list[Path]:
    """Write prompt files of rows {"prompt", "image"}, and the pictures that they name.

    Each picture has a row for each of MOTIONS. Returns the prompt files' paths. The same in every
    version: the seed is fixed.
    """

    def rows(rng: np.random.Generator) -> tuple[np.ndarray, list[dict[str, object]]]:
        subject, pixels_HWC = _sample_frame(rng)
        return pixels_HWC, [{"prompt": motion.format(object=subject)} for motion in MOTIONS]

    return write_pictured_prompts(folder, FILES, rows, seed=SEED, png=SMALL)


def _sample_frame(rng: np.random.Generator) -> tuple[str, np.ndarray]:
    """Draw two shapes apart from each other. Returns the first one's name, and the picture."""
    pixels_HWC = np.full((HEIGHT, WIDTH, 3), rng.integers(185, 250), np.uint8)
    colors = rng.permutation(list(COLORS)).tolist()
    shapes = rng.permutation(SHAPES).tolist()
    sides = rng.permutation([0, WIDTH // 2]).tolist()  # one in each half
    for color, shape, left in zip(colors[:2], shapes, sides, strict=False):
        x = left + rng.uniform(MARGIN, WIDTH // 2 - MARGIN)
        y = rng.uniform(MARGIN, HEIGHT - MARGIN)
        radius = rng.uniform(*RADIUS)
        fill_shape(pixels_HWC, shape, center=(x, y), radius=radius, color=COLORS[color])
    return f"{colors[0]} {shapes[0]}", pixels_HWC


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m examples.shapes.first_frames FOLDER")
    write_first_frames(Path(sys.argv[1]))
