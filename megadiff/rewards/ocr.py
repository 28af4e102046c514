"""ocr: does the image show the text that its prompt quotes. The one module that knows rapidocr-onnxruntime (1.4.4)."""

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

# Leftmost quote wins, so an apostrophe inside "..." is text. A single quote opens and closes only at a word's edge:
# the apostrophes of "the dog's bowl" quote nothing.
_QUOTED = re.compile(r"""["“”„]([^"“”]*)["“”]|‘(.+?)’(?!\w)|(?<!\w)'(.+?)'(?!\w)""")
_MAX_SIDE = 1664  # pixels; larger images are scaled down: Qwen-Image's longest side, at 16:9
_MIN_SIDE = 64  # shorter sides are padded: the engine's own resizing fails on slivers
_MAX_ASPECT = 4  # longer images are padded: the detector scales the short side up to 512


class OcrReward(Reward):
    """1 − edit_distance(found, wanted) / len(wanted), clipped to [0, 1]: 1 is exactly the text, 0 is none of it.

    wanted: the row's `text` field, else all quoted parts of the prompt ("…", “…”, ‘…’ or '…') in order. found: all text
    lines of the image, top to bottom. Both lower-cased and without white space, as in Flow-GRPO (arXiv 2505.05470,
    appendix), and in Unicode NFKC, because the engine answers full-width punctuation at times. As the edit distance
    counts them, further letters cost as much as missing ones; Flow-GRPO's own code forgives them where the wanted
    text appears unbroken, which is allow_extra_text=True.
    Video: mean over every frame_stride-th frame. The engine's models (PP-OCRv4, shipped in its package) read Latin
    letters without accents, digits, punctuation and Chinese.
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
        """All text of one frame [H, W, 3] uint8 RGB, lines joined from top to bottom."""
        # An engine per thread: RapidOCR keeps the current image's preprocessing in the object.
        if not hasattr(self._local, "engine"):
            self._local.engine = _build_engine()
        lines, _ = self._local.engine(
            np.ascontiguousarray(to_canvas(pixels)[:, :, ::-1])
        )  # it expects BGR
        return "".join(text for _, text, _ in lines or ())


def _build_engine() -> Callable:
    """A RapidOCR engine on one core: samples, not operators, are what runs in parallel."""
    from rapidocr_onnxruntime import RapidOCR  # optional dependency, and 0.4 s of import

    # Detection at 512 instead of 736 pixels is twice as fast and reads the same; no rotated lines, as in Flow-GRPO.
    return RapidOCR(
        intra_op_num_threads=1,
        inter_op_num_threads=1,
        use_cls=False,
        det_limit_type="min",
        det_limit_side_len=512,
    )


def wanted_text(prompt: Prompt) -> str:
    """The text to be read in the image, as written. ValueError where the prompt has none."""
    text = prompt.fields.get("text")
    if text is None:
        text = "".join("".join(groups) for groups in _QUOTED.findall(prompt.text))
    if not isinstance(text, str) or not normalise(text):
        raise ValueError(
            f"the ocr reward needs text to look for, found {text!r} for the prompt {prompt.text[:200]!r}; "
            'put it in quotes ("…", “…” or \'…\') or give the row a string field "text"'
        )
    return text


def text_score(found: str, wanted: str, *, allow_extra_text: bool = False) -> float:
    """In [0, 1], see OcrReward."""
    found, wanted = normalise(found), normalise(wanted)
    if allow_extra_text and wanted in found:
        return 1.0
    return max(0.0, 1.0 - edit_distance(found, wanted) / len(wanted))


def normalise(text: str) -> str:
    return "".join(unicodedata.normalize("NFKC", text).lower().split())


def edit_distance(a: str, b: str) -> int:
    """Least number of insertions, deletions and replacements that turn a into b (Levenshtein); O(len(a)·len(b))."""
    row = list(range(len(b) + 1))
    for i, char_a in enumerate(a, start=1):
        diagonal, row[0] = row[0], i
        for j, char_b in enumerate(b, start=1):
            diagonal, row[j] = (
                row[j],
                min(row[j] + 1, row[j - 1] + 1, diagonal + (char_a != char_b)),
            )
    return row[-1]


def to_canvas(pixels: np.ndarray) -> np.ndarray:
    """The frame [H, W, 3] scaled down to the engine's limit and padded with its edge colours to a shape it can take."""
    height, width = pixels.shape[:2]
    scale = min(1.0, _MAX_SIDE / max(height, width))
    if scale < 1.0:
        size = (max(1, round(width * scale)), max(1, round(height * scale)))
        pixels = np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BILINEAR))
        height, width = pixels.shape[:2]
    least = max(_MIN_SIDE, -(-max(height, width) // _MAX_ASPECT))
    pad_height, pad_width = max(0, least - height), max(0, least - width)
    if not pad_height and not pad_width:
        return pixels
    rows = (pad_height // 2, pad_height - pad_height // 2)
    columns = (pad_width // 2, pad_width - pad_width // 2)
    return np.pad(pixels, (rows, columns, (0, 0)), mode="edge")
