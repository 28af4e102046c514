"""Images and videos inside a page: small enough together, sharp enough to look at, and as HTML that a click enlarges."""

from __future__ import annotations

import base64
import io
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from megadiff.observe import video

logger = logging.getLogger(__name__)

PICTURE_BYTES = 7_000_000  # of all files of a page together; base64 makes a third more of it
SIDES = (
    320,
    256,
    192,
    128,
    96,
)  # longest side of a picture in pixels, the first that keeps within PICTURE_BYTES
PIXELATED_BELOW = 96  # a picture smaller than this is enlarged in whole pixels, not blurred

Original = (
    Image.Image | tuple[int, int]
)  # of a video, which is read each time it is made smaller, the size


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A sample as it goes into a page. mime: image/png or video/mp4. size: width and height of the original."""

    mime: str
    data: bytes
    size: tuple[int, int]


def load_pictures(paths: Sequence[Path]) -> dict[Path, Picture]:
    """All that can be read, at the largest of SIDES at which they keep within PICTURE_BYTES (or at the smallest); what is
    damaged or gone is left out with a warning."""
    originals = {path: _original(path) for path in paths}
    for side in SIDES:
        pictures = _within_budget(
            originals, side, budget=PICTURE_BYTES if side != SIDES[-1] else None
        )
        if pictures is not None:
            return pictures
    raise AssertionError("the smallest side has no budget")


def _within_budget(
    originals: Mapping[Path, Original | None], side: int, *, budget: int | None
) -> dict[Path, Picture] | None:
    """All pictures with their longest side at most `side`; None as soon as they take more than the budget."""
    pictures: dict[Path, Picture] = {}
    num_bytes = 0
    for path, original in originals.items():
        picture = (
            _png(original, side)
            if isinstance(original, Image.Image)
            else _mp4(path, original, side)
        )
        if picture is None:
            continue
        pictures[path] = picture
        num_bytes += len(picture.data)
        if budget is not None and num_bytes > budget:
            return None
    return pictures


def _original(path: Path) -> Original | None:
    """None, with a warning, for a file that is damaged or gone."""
    if path.suffix == video.SUFFIX:
        return video.video_size(path)
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (
        UnidentifiedImageError,
        OSError,
        SyntaxError,
    ) as error:  # PIL's ways to say "no whole image"
        logger.warning("%s cannot be read and is left out: %s", path, error)
        return None


def _png(image: Image.Image, side: int) -> Picture:
    """The image with its longest side at most `side`."""
    small = image.copy()
    small.thumbnail((side, side), Image.Resampling.LANCZOS)
    out = io.BytesIO()
    small.save(out, "PNG", optimize=True)
    return Picture(mime="image/png", data=out.getvalue(), size=image.size)


def _mp4(path: Path, size: tuple[int, int] | None, side: int) -> Picture | None:
    if size is None:
        return None
    data = path.read_bytes() if max(size) <= side else video.shrunk_video(path, side)
    return Picture(mime="video/mp4", data=data, size=size) if data else None


def frame(picture: Picture, *, title: str, alt: str) -> str:
    """The picture, which a click enlarges. Videos play, silent and over and over, while they can be seen (report.js)."""
    url = f"data:{picture.mime};base64,{base64.b64encode(picture.data).decode('ascii')}"
    pixelated = ' class="pixelated"' if max(picture.size) < PIXELATED_BELOW else ""
    shared = f'{pixelated} src="{url}" width="{picture.size[0]}" height="{picture.size[1]}"'
    if picture.mime.startswith("video/"):
        inner = f'<video{shared} aria-label="{escape(alt)}" muted loop playsinline preload="auto"></video>'
    else:
        inner = f'<img{shared} alt="{escape(alt)}">'
    return f'<button type="button" class="frame" title="{escape(title)}">{inner}</button>'
