"""The shipped first frames are what the program writes, of the size that the recipe draws."""

from __future__ import annotations

import json
from pathlib import Path

import cv2
import numpy as np
import pytest

from examples.shapes.first_frames import FILES, HEIGHT, MOTIONS, WIDTH, write_first_frames

SHIPPED = Path(__file__).parents[4] / "assets/prompts/first_frames"


@pytest.mark.slow
def test_the_shipped_data_is_what_the_program_writes(tmp_path: Path) -> None:
    for path in write_first_frames(tmp_path):
        assert path.read_bytes() == (SHIPPED / path.name).read_bytes()
        rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        assert len(rows) == FILES[path.name] * len(MOTIONS)
        for image in {row["image"] for row in rows}:
            pixels_HWC = cv2.imread(str(tmp_path / image))
            assert pixels_HWC.shape == (HEIGHT, WIDTH, 3)
            # a background and two shapes, the borders of which are smooth
            assert 3 <= len(np.unique(pixels_HWC.reshape(-1, 3), axis=0)) < 2000
            assert np.array_equal(cv2.imread(str(SHIPPED / image)), pixels_HWC)
