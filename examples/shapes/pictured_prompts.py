"""Write prompt files whose rows name drawn pictures."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import cv2
import numpy as np

# a picture uint8 RGB [H, W, 3], and its rows without `image`
Drawn = tuple[np.ndarray, list[dict[str, object]]]


def write_pictured_prompts(
    folder: Path,
    files: Mapping[str, int],
    draw: Callable[[np.random.Generator], Drawn],
    *,
    seed: int,
    png: Sequence[int] = (),
) -> list[Path]:
    """Write prompt files, name → number of pictures, and the pictures beside them.

    draw: makes the next picture and its rows. png: OpenCV's settings of the files.
    Returns the prompt files' paths.
    """
    rng = np.random.default_rng(seed)
    for name, count in files.items():
        stem = Path(name).stem
        (folder / stem).mkdir(parents=True, exist_ok=True)
        rows = []
        for number in range(count):
            pixels_HWC, drawn_rows = draw(rng)
            image = f"{stem}/{number:03}.png"
            # OpenCV writes BGR
            cv2.imwrite(str(folder / image), pixels_HWC[..., ::-1], png)
            for row in drawn_rows:
                prompt = row.pop("prompt")
                rows.append({"prompt": prompt, "image": image, **row})
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / name).write_text(lines, encoding="utf-8")
    return [folder / name for name in files]
