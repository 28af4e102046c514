"""Save and read samples of a run: `samples/step_000010/*.png`, of videos `*.mp4`.

Captions and rewards are in a `samples.jsonl` beside them.
"""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from megadiff.observe import video
from megadiff.observe.step_folders import step_folder, step_folders
from megadiff.observe.text_files import parse_line, read_lines

logger = logging.getLogger(__name__)

SAMPLES = "samples"  # under a run's folder
INDEX_NAME = "samples.jsonl"
IMAGE_SUFFIX = ".png"
# Frames of a video stand side by side where only images can be shown; more would be too small.
MAX_FRAMES = 4
GAP = 2  # pixels between the pictures of a grid


@dataclass(frozen=True, kw_only=True)
class SampleFacts:
    """Hold what is known of a sample beside its picture.

    caption: the prompt.
    rewards: reward name → raw value, None or NaN where it has none. reward: the total that the
    advantage is made of.
    prompt_id, sample_index: its identity. policy_version: weights that drew it.
    thought: what the model wrote about the prompt before it drew.
    """

    caption: str
    rewards: Mapping[str, float | None]
    reward: float | None
    prompt_id: str
    sample_index: int
    policy_version: int
    thought: str = ""


@dataclass(frozen=True, kw_only=True)
class SampleRecord(SampleFacts):
    """A sample to be looked at. pixels: uint8 [F, H, W, 3], F = 1 for an image."""

    pixels: Tensor
    frames_per_s: int = video.FRAMES_PER_S


@dataclass(frozen=True, kw_only=True)
class SavedSample(SampleFacts):
    """A sample on disk, one line of a samples.jsonl; a reward that was not finite is None."""

    path: Path
    step: int


def save_samples(run_folder: Path, *, step: int, samples: Sequence[SampleRecord]) -> Path:
    """Write the samples of one step and return their folder.

    It is written aside and renamed, so it is always whole; the same step again (a resumed run)
    replaces it. Raises ValueError for pixels that are not uint8 [F, H, W, 3].
    """
    target = step_folder(run_folder / SAMPLES, step)
    aside = target.with_name(f".{target.name}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)

    with (aside / INDEX_NAME).open("w", encoding="utf-8") as index:
        for number, sample in enumerate(samples):
            name = _file_name(number, sample)
            write_picture(aside / name, sample.pixels, frames_per_s=sample.frames_per_s)
            entry = {
                "file": name,
                "caption": sample.caption,
                "prompt_id": sample.prompt_id,
                "sample_index": sample.sample_index,
                "policy_version": sample.policy_version,
                "reward": _finite(sample.reward),
                "rewards": {reward: _finite(value) for reward, value in sample.rewards.items()},
            }
            if sample.thought:
                entry["thought"] = sample.thought
            index.write(json.dumps(entry, ensure_ascii=False) + "\n")

    # A rename replaces no folder that holds files.
    if target.exists():
        shutil.rmtree(target)
    return aside.rename(target)


def _file_name(number: int, sample: SampleRecord) -> str:
    """Return a name that is unique by `number`, readable, and safe on every file system."""
    words = re.sub(r"[^a-z0-9]+", "-", sample.caption.lower()).strip("-")[:40].strip("-")
    return f"{number:03d}_{words or 'prompt'}_{sample.sample_index}{picture_suffix(sample.pixels)}"


# JSON has no NaN: a reader in another language would refuse the line.
def _finite(value: float | None) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None


def picture_suffix(pixels: Tensor) -> str:
    """Return the suffix of the file that write_picture makes of pixels."""
    return IMAGE_SUFFIX if len(pixels) == 1 else video.SUFFIX


def write_picture(path: Path, pixels: Tensor, *, frames_per_s: int = video.FRAMES_PER_S) -> None:
    """Write one frame as PNG, more as MP4; path ends in picture_suffix.

    Raises ValueError for pixels that are not uint8 [F, H, W, 3].
    """
    _check_pixels(pixels)
    if len(pixels) == 1:
        Image.fromarray(pixels[0].detach().cpu().numpy()).save(path)
    else:
        video.write_video(path, pixels, frames_per_s=frames_per_s)


def _check_pixels(pixels: Tensor) -> None:
    if pixels.dtype != torch.uint8 or pixels.ndim != 4 or pixels.shape[-1] != 3:
        raise ValueError(
            f"pixels are {pixels.dtype} {list(pixels.shape)}, not uint8 [F, H, W, 3]; convert "
            "them first"
        )


def frame_strip(pixels: Tensor) -> Tensor:
    """Return a video's frames in a row: [F, H, W, 3] uint8 → [H, W·min(F, MAX_FRAMES), 3]."""
    _check_pixels(pixels)
    num_frames = pixels.shape[0]
    picked = torch.linspace(0, num_frames - 1, min(num_frames, MAX_FRAMES)).round().long()
    return torch.cat(list(pixels.detach().cpu()[picked]), dim=1).contiguous()


def picture_grid(pictures: Sequence[Tensor], *, columns: int = 8) -> Tensor:
    """Return pictures [F, H, W, 3] in one image, uint8 [3, H', W'], row by row on white.

    All cells have the size of the largest one. Raises ValueError without pictures.
    """
    if not pictures:
        raise ValueError(
            "0 samples, a grid needs at least 1; skip the call when nothing was sampled"
        )

    strips = [frame_strip(pixels) for pixels in pictures]
    height = max(strip.shape[0] for strip in strips)
    width = max(strip.shape[1] for strip in strips)
    columns = min(columns, len(strips))
    rows = math.ceil(len(strips) / columns)

    # The gap is between cells only, hence one less than cells.
    grid = torch.full(
        (rows * (height + GAP) - GAP, columns * (width + GAP) - GAP, 3), 255, dtype=torch.uint8
    )

    for number, strip in enumerate(strips):
        top = number // columns * (height + GAP)
        left = number % columns * (width + GAP)
        grid[top : top + strip.shape[0], left : left + strip.shape[1]] = strip

    # Trackers want channels first.
    return grid.permute(2, 0, 1)


def read_pixels(path: Path) -> Tensor:
    """Return a saved picture's pixels, uint8 [F, H, W, 3].

    Raises OSError or av.FFmpegError for a damaged file.
    """
    if path.suffix == video.SUFFIX:
        return torch.stack([torch.from_numpy(frame) for frame in video.read_frames(path)])
    with Image.open(path) as image:
        return torch.from_numpy(np.array(image.convert("RGB")))[None]


def shrunk(pixels: Tensor, side: int) -> Tensor:
    """Return pixels [F, H, W, 3] with their longest side at most `side`."""
    if max(pixels.shape[1:3]) <= side:
        return pixels
    frames = [video.shrunk_frame(frame, side) for frame in pixels.numpy()]
    return torch.from_numpy(np.stack(frames))


def read_samples(run_folder: Path) -> list[SavedSample]:
    """Read every saved sample by rising step; warn of torn lines and missing files."""
    samples = []
    for step, folder in step_folders(run_folder / SAMPLES):
        samples += read_step_samples(folder, step)
    return samples


def read_step_samples(folder: Path, step: int) -> list[SavedSample]:
    """Read the samples of one step's folder; warn of torn lines and missing files."""
    samples = []
    path = folder / INDEX_NAME
    lines = read_lines(path) if path.exists() else []

    for number, line in enumerate(lines, start=1):
        try:
            entry = parse_line(line)
            sample = SavedSample(path=folder / entry.pop("file"), step=step, **entry)
            if not isinstance(sample.caption, str) or not isinstance(sample.rewards, dict):
                raise TypeError("a sample has a caption, and rewards by name")
        except (AttributeError, KeyError, TypeError):  # torn, or not one of our lines
            logger.warning("%s: line %d is no sample and skipped", path, number)
            continue

        if sample.path.exists():
            samples.append(sample)
        else:
            logger.warning("%s: %s is missing and skipped", folder, sample.path.name)

    return samples
