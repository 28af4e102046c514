"""Choose samples for a page and shrink them: small enough together, sharp enough to look at."""

from __future__ import annotations

import base64
import io
import logging
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from megadiff.observe import video
from megadiff.observe.metrics import pretty_number
from megadiff.observe.samples import SavedSample
from megadiff.report.charts import Drawing

logger = logging.getLogger(__name__)

# Of a section's pictures together; base64 makes a third more of it. Three such sections and the
# charts of 1,000 steps are a page of less than a megabyte.
SECTION_BYTES = 150_000
# Longest side of a picture in pixels: the first that keeps within its bytes, else the last.
SIDES = (320, 256, 192, 160, 128, 96)
QUALITY = 80  # of WebP, out of 100
PIXELATED_BELOW = 96  # a picture smaller than this is enlarged in whole pixels, not blurred
MAX_PROMPTS = 8  # with a strip of samples
MAX_COLUMNS = 10  # of a strip
MAX_STEPS = 5  # with a strip of their own, where no prompt came twice

# A video is read each time it is made smaller, so only its size is kept.
Original = Image.Image | tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A sample as it goes into a page. size: width and height of the original."""

    data: bytes
    size: tuple[int, int]
    is_video: bool

    @property
    def url(self) -> str:
        mime = "video/mp4" if self.is_video else "image/webp"
        return f"data:{mime};base64,{base64.b64encode(self.data).decode('ascii')}"

    @property
    def is_pixelated(self) -> bool:
        return max(self.size) < PIXELATED_BELOW


def load_pictures(paths: Sequence[Path]) -> dict[Path, Picture]:
    """Return all pictures that can be read; damaged or missing ones are skipped with a warning."""
    originals = {}

    for path in paths:
        original = video.video_size(path) if path.suffix == video.SUFFIX else _read_image(path)
        if original is not None:
            originals[path] = original

    # Small pictures without loss first.
    for side, is_lossless in [(SIDES[0], True), *((side, False) for side in SIDES[:-1])]:
        pictures = _shrink_all(originals, side, budget=SECTION_BYTES, is_lossless=is_lossless)
        if pictures is not None:
            return pictures

    # The smallest side has no limit: a large page is better than none.
    return _shrink_all(originals, SIDES[-1], budget=math.inf, is_lossless=False) or {}


def _shrink_all(
    originals: Mapping[Path, Original], side: int, *, budget: float, is_lossless: bool
) -> dict[Path, Picture] | None:
    """Return pictures with sides ≤ `side`; None as soon as they take more bytes than the budget."""
    pictures = {}
    num_bytes = 0

    for path, original in originals.items():
        if isinstance(original, Image.Image):
            size = original.size
            # Where single pixels are seen, none should be wrong.
            is_exact = is_lossless and max(size) < PIXELATED_BELOW
            data: bytes | None = _webp(original, side, is_lossless=is_exact)
        else:
            size = original
            # Encoding again costs quality, so a small one goes in as it is.
            data = path.read_bytes() if max(size) <= side else video.shrunk_video(path, side)

        if data is None:
            continue
        pictures[path] = Picture(data=data, size=size, is_video=path.suffix == video.SUFFIX)
        num_bytes += len(data)
        if num_bytes > budget:
            return None

    return pictures


def _read_image(path: Path) -> Image.Image | None:
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    # PIL raises any of these for a torn file.
    except (UnidentifiedImageError, OSError, SyntaxError) as error:
        logger.warning("%s cannot be read and is left out: %s", path, error)
        return None


def _webp(image: Image.Image, side: int, *, is_lossless: bool) -> bytes:
    # thumbnail() works in place, and the original may be needed again for a smaller side.
    small = image.copy()
    small.thumbnail((side, side), Image.Resampling.LANCZOS)
    out = io.BytesIO()
    small.save(out, "WEBP", quality=QUALITY, lossless=is_lossless)
    return out.getvalue()


def rewards_text(rewards: Mapping[str, float | None]) -> str:
    """Write all rewards of a sample in one line."""
    return " · ".join(f"{name} {pretty_number(value)}" for name, value in rewards.items())


def evenly_spaced(items: Sequence[int], count: int) -> list[int]:
    """Return at most `count` of the items, the first and the last among them."""
    if len(items) <= count:
        return list(items)
    return [items[round(index * (len(items) - 1) / (count - 1))] for index in range(count)]


def pick_rows(samples: Sequence[SavedSample]) -> list[list[SavedSample | None]]:
    """Return a row of samples over steps for each of the prompts seen at the most steps.

    A row holds evenly spaced steps and the lowest sample index of each. Where all rows together
    need few enough steps, columns are steps and None marks a step without that prompt; otherwise
    each row has its own steps.
    """
    by_prompt: dict[str, dict[int, SavedSample]] = defaultdict(dict)
    for sample in sorted(samples, key=lambda sample: (sample.step, sample.sample_index)):
        by_prompt[sample.prompt_id].setdefault(sample.step, sample)

    # sorted() is stable: of equally frequent prompts the first seen go first.
    prompts = sorted(by_prompt.values(), key=len, reverse=True)[:MAX_PROMPTS]

    rows: list[list[SavedSample | None]] = []
    columns: set[int] = set()

    for by_step in prompts:
        steps = evenly_spaced(sorted(by_step), MAX_COLUMNS)
        rows.append([by_step[step] for step in steps])
        columns.update(steps)

    if len(columns) > MAX_COLUMNS:
        return rows
    return [list(map(by_step.get, sorted(columns))) for by_step in prompts]


def step_rows(samples: Sequence[SavedSample]) -> list[list[SavedSample]]:
    """Return a row a saved step, evenly spaced, with the first sample of each of its prompts."""
    by_step: dict[int, dict[str, SavedSample]] = defaultdict(dict)
    for sample in sorted(samples, key=lambda sample: sample.sample_index):
        by_step[sample.step].setdefault(sample.prompt_id, sample)
    steps = evenly_spaced(sorted(by_step), MAX_STEPS)
    return [list(by_step[step].values())[:MAX_PROMPTS] for step in steps]


def comes_again(rows: Sequence[Sequence[SavedSample | None]]) -> bool:
    """Return True where a row of pick_rows() shows its prompt at two steps or more."""
    for row in rows:
        num_looks = sum(sample is not None for sample in row)
        if num_looks > 1:
            return True
    return False


def strips(samples: Sequence[SavedSample]) -> list[Drawing]:
    """Return a strip per prompt: its caption, and a look or None per step; [] without a picture.

    A look's picture is None where it could not be read.

    Where no prompt came twice, a strip per step: its prompts beside each other.
    """
    rows: Sequence[Sequence[SavedSample | None]] = pick_rows(samples)
    is_by_prompt = comes_again(rows)
    if not is_by_prompt:
        rows = step_rows(samples)
    pictures = load_pictures([sample.path for row in rows for sample in row if sample])
    drawn = [_strip(row, pictures, is_by_prompt=is_by_prompt) for row in rows]

    return drawn if pictures else []


def _strip(
    row: Sequence[SavedSample | None], pictures: Mapping[Path, Picture], *, is_by_prompt: bool
) -> Drawing:
    looks: list[Drawing | None] = []
    for sample in row:
        label = {} if sample is None or is_by_prompt else {"label": sample.caption}
        looks.append(look(sample, pictures) | label if sample else None)
    first = next(sample for sample in row if sample)
    return {"caption": first.caption if is_by_prompt else f"step {first.step}", "looks": looks}


def look(sample: SavedSample, pictures: Mapping[Path, Picture]) -> Drawing:
    """Return what a strip shows of a sample."""
    step = f"step {sample.step}"
    weights = f"weights of version {sample.policy_version}"

    return {
        "picture": pictures.get(sample.path),
        "alt": f"{sample.caption}, {step}",
        "title": f"{step}, {weights}: {rewards_text(sample.rewards) or 'no rewards'}",
        "label": sample.step,
        "reward": sample.reward,
    }
