"""The report's section of samples: the same prompt over time, one row a prompt."""

from __future__ import annotations

import base64
import io
import logging
from collections import defaultdict
from collections.abc import Sequence
from html import escape
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from megadiff.observe.metrics import pretty_number
from megadiff.observe.samples import SavedSample

logger = logging.getLogger(__name__)

MAX_PROMPTS = 8
MAX_COLUMNS = 10
IMAGE_BYTES = 7_000_000  # of all PNGs together; base64 makes a third more of it
SIDES = (320, 256, 192, 128, 96)  # longest side of an image in pixels, the first that keeps within IMAGE_BYTES
PIXELATED_BELOW = 96  # an image smaller than this is enlarged in whole pixels, not blurred


def evenly_spaced(items: Sequence[int], count: int) -> list[int]:
    """At most `count` of the items, the first and the last among them."""
    if len(items) <= count:
        return list(items)
    return [items[round(index * (len(items) - 1) / (count - 1))] for index in range(count)]


def pick_rows(samples: Sequence[SavedSample]) -> list[list[SavedSample | None]]:
    """The prompts seen at the most steps, each with evenly spaced steps and the lowest sample index of each step.

    Where all rows together need few enough steps, columns are steps and None marks a step without that prompt;
    otherwise each row has its own steps.
    """
    by_prompt: dict[str, dict[int, SavedSample]] = defaultdict(dict)
    for sample in sorted(samples, key=lambda sample: (sample.step, sample.sample_index)):
        by_prompt[sample.prompt_id].setdefault(sample.step, sample)
    # sorted() is stable: of equally frequent prompts the first seen go first.
    chosen = sorted(by_prompt.values(), key=len, reverse=True)[:MAX_PROMPTS]
    rows = [[row[step] for step in evenly_spaced(sorted(row), MAX_COLUMNS)] for row in chosen]
    columns = sorted({sample.step for row in rows for sample in row})
    if len(columns) > MAX_COLUMNS:
        return rows
    return [[row.get(step) for step in columns] for row in chosen]


def load_image(path: Path) -> Image.Image | None:
    """The image in RGB; None, with a warning, when the file is damaged or gone."""
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (UnidentifiedImageError, OSError, SyntaxError) as error:  # PIL's ways to say "no whole image"
        logger.warning("%s cannot be read and is left out: %s", path, error)
        return None


def _png(image: Image.Image, side: int) -> bytes:
    """PNG of the image with its longest side at most `side`."""
    small = image.copy()
    small.thumbnail((side, side), Image.Resampling.LANCZOS)
    out = io.BytesIO()
    small.save(out, "PNG", optimize=True)
    return out.getvalue()


def encode(images: Sequence[Image.Image]) -> list[bytes]:
    """PNGs of all images at the largest of SIDES at which they keep within IMAGE_BYTES (or at the smallest)."""
    pngs: list[bytes] = []
    for side in SIDES:
        pngs = [_png(image, side) for image in images]
        if sum(map(len, pngs)) <= IMAGE_BYTES:
            break
    return pngs


def samples_section(samples: Sequence[SavedSample]) -> str:
    """Rows of prompts with their samples over steps; "" without a readable sample."""
    rows = pick_rows(samples)
    images = {sample.path: load_image(sample.path) for row in rows for sample in row if sample is not None}
    whole = {path: image for path, image in images.items() if image is not None}
    if not whole:
        return ""
    pngs = dict(zip(whole, encode(list(whole.values()))))
    body = "".join(_row(row, whole, pngs) for row in rows)
    return (
        "<section><header><h2>The same prompt over time</h2>"
        "<p>One row a prompt, its first sample at each saved step, with the reward it got.</p></header>"
        f'<div class="samples">{body}</div></section>'
    )


def frame(png: bytes, size: tuple[int, int], *, title: str, alt: str) -> str:
    """An image of the page, which a click enlarges. size: width and height of the original."""
    url = "data:image/png;base64," + base64.b64encode(png).decode("ascii")
    pixelated = ' class="pixelated"' if max(size) < PIXELATED_BELOW else ""
    return (
        f'<button type="button" class="frame" title="{escape(title)}"><img{pixelated} src="{url}" '
        f'alt="{escape(alt)}" width="{size[0]}" height="{size[1]}"></button>'
    )


def _row(row: Sequence[SavedSample | None], images: dict[Path, Image.Image], pngs: dict[Path, bytes]) -> str:
    caption = next(sample.caption for sample in row if sample is not None)
    cells = "".join('<li class="gap"></li>' if s is None or s.path not in pngs else _cell(s, images, pngs) for s in row)
    return f'<article class="card"><h3>{escape(caption)}</h3><ol class="strip">{cells}</ol></article>'


def _cell(sample: SavedSample, images: dict[Path, Image.Image], pngs: dict[Path, bytes]) -> str:
    names = " · ".join(f"{name} {pretty_number(value)}" for name, value in sample.rewards.items())
    title = f"step {sample.step}, weights of version {sample.policy_version}: {names or 'no rewards'}"
    picture = frame(
        pngs[sample.path], images[sample.path].size, title=title, alt=f"{sample.caption}, step {sample.step}"
    )
    return f"<li>{picture}<p><span>step {sample.step}</span><b>{pretty_number(sample.reward)}</b></p></li>"
