"""Write and read MP4 files that every browser plays: H.264 in 4:2:0.

The one module that knows PyAV (18.1, 19.0).
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from fractions import Fraction
from itertools import chain
from pathlib import Path

import av
import numpy as np
from PIL import Image
from torch import Tensor

logger = logging.getLogger(__name__)

SUFFIX = ".mp4"
FRAMES_PER_S = 16  # of saved videos where their model's own rate is not known
QUALITY = 18  # x264's rate factor: at 17 or 18 a video looks as it did
PRESET = "veryfast"  # three times as fast as the default, and files a little larger


def write_video(path: Path, pixels: Tensor, *, frames_per_s: int = FRAMES_PER_S) -> None:
    """Write pixels, uint8 [F, H, W, 3]; odd sides lose their last row or column."""
    path.write_bytes(_encode(iter(pixels.detach().cpu().numpy()), Fraction(frames_per_s)))


def video_size(path: Path) -> tuple[int, int] | None:
    """Return width and height; None, with a warning, when the file is damaged or gone."""
    try:
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            return stream.width, stream.height
    except (av.FFmpegError, IndexError) as error:
        logger.warning("%s cannot be read and is left out: %s", path, error)
        return None


def video_rate(path: Path) -> Fraction:
    """Return a video's rate, FRAMES_PER_S where its file does not say. For other files as well."""
    if path.suffix != SUFFIX:
        return Fraction(FRAMES_PER_S)
    with av.open(str(path)) as container:
        return container.streams.video[0].average_rate or Fraction(FRAMES_PER_S)


def to_gif(pixels: Tensor, *, frames_per_s: Fraction) -> bytes:
    """Return an animated GIF of pixels, uint8 [F, H, W, 3], for viewers without a video player."""
    frames = [Image.fromarray(frame) for frame in pixels.numpy()]
    # A GIF counts hundredths of a second: rounding each frame's end keeps the rate in the mean.
    ends = [round(100 * number / frames_per_s) for number in range(len(frames) + 1)]
    durations_ms = [10 * (end - start) for start, end in zip(ends, ends[1:])]
    out = io.BytesIO()
    frames[0].save(
        out, "GIF", save_all=True, append_images=frames[1:], duration=durations_ms, loop=0
    )
    return out.getvalue()


def shrunk_video(path: Path, side: int) -> bytes | None:
    """Return the video with its longest side at most `side`, as fast as it was.

    A damaged file gives a warning and None.
    """
    try:
        return _encode((shrunk_frame(frame, side) for frame in read_frames(path)), video_rate(path))
    except (av.FFmpegError, IndexError, StopIteration) as error:
        logger.warning("%s cannot be read and is left out: %s", path, error)
        return None


def read_frames(path: Path) -> Iterator[np.ndarray]:
    """Yield frames, uint8 RGB [H, W, 3]. Raises av.FFmpegError for a damaged file."""
    with av.open(str(path)) as container:
        for frame in container.decode(video=0):
            yield frame.to_ndarray(format="rgb24")


def shrunk_frame(frame: np.ndarray, side: int) -> np.ndarray:
    """Return a frame [H, W, 3] with its longest side at most `side`."""
    image = Image.fromarray(frame)
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    return np.asarray(image)


def _encode(frames: Iterator[np.ndarray], frames_per_s: Fraction) -> bytes:
    """Return an MP4. Sides of 1 pixel are doubled, odd ones cut."""
    start = next(frames)
    # The stream must know its size before the first frame is encoded.
    first = _even(start)
    frames = chain([start], frames)

    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream(
            "libx264", rate=frames_per_s, options={"crf": str(QUALITY), "preset": PRESET}
        )
        stream.height, stream.width = first.shape[:2]
        # Not every browser plays H.264 in other formats.
        stream.pix_fmt = "yuv420p"

        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(_even(frame), format="rgb24")))
        # Flushes the frames that x264 holds back to look ahead.
        container.mux(stream.encode())

    return out.getvalue()


def _even(frame: np.ndarray) -> np.ndarray:
    """Return [H, W, 3] with both sides even, as 4:2:0 halves them."""
    height, width = (max(2, side // 2 * 2) for side in frame.shape[:2])
    missing = [(0, max(0, 2 - side)) for side in frame.shape[:2]]
    return np.ascontiguousarray(np.pad(frame, (*missing, (0, 0)), mode="edge")[:height, :width])
