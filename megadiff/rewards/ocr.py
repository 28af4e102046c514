"""Reward ocr: compare the text in an image with the one that its prompt quotes.

The one module that knows rapidocr-onnxruntime (1.4.4).
"""

from __future__ import annotations

import importlib.util
import re
import threading
import unicodedata
from collections.abc import Callable, Sequence

import numpy as np
from PIL import Image

from megadiff.rewards.base import Reward, RewardSample
from megadiff.types import Prompt

# A mark of inches, as in 24", opens nothing.
_DOUBLE_QUOTED = re.compile(r"""(?:[“„]|(?<!\d)["”])([^"“”]*)["“”]""")
# At a word's edge only: the apostrophe of "the dog's bowl" quotes nothing.
_SINGLE_QUOTED = re.compile(r"""‘(.+?)’(?!\w)|(?<!\w)'(.+?)'(?!\w)""")
_MAX_SIDE = 1664  # pixels; larger images are scaled down: Qwen-Image's longest side, at 16:9
_MIN_SIDE = 64  # shorter sides are padded: the engine's own resizing fails on slivers
_MAX_ASPECT = 4  # longer images are padded: the detector scales the short side up to 512


class OcrReward(Reward):
    """Score 1 − edit_distance(seen, wanted) / len(wanted), clipped to [0, 1].

    wanted: the row's `text` field, else all parts of the prompt in double quotes ("…" or “…”) in
    order, else all in single quotes (‘…’ or '…'). seen: all text lines of the image, top to bottom.
    Both are compared as normalise() has them. Flow-GRPO, arXiv 2505.05470, appendix.
    allow_extra_text: further letters cost nothing where the wanted text appears unbroken, as in
    Flow-GRPO's own code; else they cost as much as missing ones.
    frame_stride: of a video every so many frames are read, and their scores averaged.
    The engine's models (PP-OCRv4, shipped in its package) read Latin letters without accents,
    digits, punctuation and Chinese.
    """

    samples_per_call = 1  # about 0.1 s each: spread over the workers

    def __init__(self, *, allow_extra_text: bool = False, frame_stride: int = 4) -> None:
        if frame_stride < 1:
            raise ValueError(
                f"frame_stride={frame_stride}, must be at least 1; 4 reads every fourth frame"
            )
        if importlib.util.find_spec("rapidocr_onnxruntime") is None:
            raise ValueError(
                "rapidocr-onnxruntime is not installed; run: pip install 'megadiff[ocr]'"
            )

        self.allow_extra_text = allow_extra_text
        self.frame_stride = frame_stride
        self._local = threading.local()

    def score(self, samples: Sequence[RewardSample]) -> list[float]:
        return [self._score_frames(sample) for sample in samples]

    def validate(self, prompts: Sequence[Prompt]) -> None:
        for prompt in prompts:
            wanted_text(prompt)

    def _score_frames(self, sample: RewardSample) -> float:
        wanted = wanted_text(sample.prompt)
        frames = sample.pixels[:: self.frame_stride]
        scores = [
            text_score(self._read(frame), wanted, allow_extra_text=self.allow_extra_text)
            for frame in frames
        ]
        return sum(scores) / len(scores)

    def _read(self, pixels: np.ndarray) -> str:
        """Return all text of a frame [H, W, 3] uint8 RGB, lines joined from top to bottom."""
        # An engine per thread: RapidOCR keeps the current image's preprocessing in the object.
        if not hasattr(self._local, "engine"):
            self._local.engine = _build_engine()
        # The engine expects OpenCV's order.
        bgr = np.ascontiguousarray(to_canvas(pixels)[:, :, ::-1])
        lines, _ = self._local.engine(bgr)
        # The engine answers None where it sees no text.
        return "".join(text for _, text, _ in lines or ())


def _build_engine() -> Callable:
    """Return a RapidOCR engine on one core: samples run in parallel, not operators."""
    from rapidocr_onnxruntime import RapidOCR  # optional dependency, and 0.4 s of import

    # Detection at 512 instead of 736 pixels is twice as fast and reads the same. No rotated lines,
    # as in Flow-GRPO.
    return RapidOCR(
        intra_op_num_threads=1,
        inter_op_num_threads=1,
        use_cls=False,
        det_limit_type="min",
        det_limit_side_len=512,
    )


def wanted_text(prompt: Prompt) -> str:
    """Return the text to be read in the image. Raises ValueError where there is none."""
    text = prompt.fields.get("text")
    if text is None:
        text = "".join(_DOUBLE_QUOTED.findall(prompt.text))
        if not normalise(text):
            # Not beside double ones: a sign of the '50s, and the customers' cars, quote nothing.
            # The pattern has a group for each kind of quotes, of which one has text in a match.
            text = "".join("".join(groups) for groups in _SINGLE_QUOTED.findall(prompt.text))

    if not isinstance(text, str) or not normalise(text):
        raise ValueError(
            f"the ocr reward needs text to look for, found {text!r} for the prompt "
            f"{prompt.text[:200]!r}; "
            'put it in quotes ("…", “…” or \'…\') or give the row a string field "text"'
        )
    return text


def text_score(seen: str, wanted: str, *, allow_extra_text: bool = False) -> float:
    """Return a number in [0, 1], see OcrReward."""
    seen = normalise(seen)
    wanted = normalise(wanted)
    if allow_extra_text and wanted in seen:
        return 1.0
    return max(0.0, 1.0 - edit_distance(seen, wanted) / len(wanted))


def normalise(text: str) -> str:
    """Return the text in lower case and without white space, as in Flow-GRPO."""
    # NFKC: the engine answers full-width punctuation at times.
    return "".join(unicodedata.normalize("NFKC", text).lower().split())


def edit_distance(a: str, b: str) -> int:
    """Return the least number of insertions, deletions and replacements from a to b.

    Levenshtein's distance, in O(len(a) · len(b)).
    """
    # row[j]: the distance from the letters of a so far to b's first j.
    row = list(range(len(b) + 1))
    for i, char_a in enumerate(a, start=1):
        diagonal = row[0]
        row[0] = i
        for j, char_b in enumerate(b, start=1):
            replaced = diagonal + (char_a != char_b)
            diagonal = row[j]
            row[j] = min(diagonal + 1, row[j - 1] + 1, replaced)
    return row[-1]


def to_canvas(pixels: np.ndarray) -> np.ndarray:
    """Scale a frame [H, W, 3] down and pad it with its edge colours to a shape the engine takes."""
    height, width = pixels.shape[:2]
    scale = min(1.0, _MAX_SIDE / max(height, width))
    if scale < 1.0:
        size = (max(1, round(width * scale)), max(1, round(height * scale)))
        pixels = np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BILINEAR))
        height, width = pixels.shape[:2]

    least = max(_MIN_SIDE, -(-max(height, width) // _MAX_ASPECT))
    pad_height = max(0, least - height)
    pad_width = max(0, least - width)

    if not pad_height and not pad_width:
        return pixels

    rows = (pad_height // 2, pad_height - pad_height // 2)
    columns = (pad_width // 2, pad_width - pad_width // 2)
    return np.pad(pixels, (rows, columns, (0, 0)), mode="edge")
