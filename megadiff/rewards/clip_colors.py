"""Name the colours of objects by CLIP, as GenEval does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from megadiff.rewards.clip_folder import load_image_processor, load_model, load_tokenizer
from megadiff.rewards.detectors import DetectedObject

COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
TEMPLATES = (
    "a photo of a {color} {label}",
    "a photo of a {color}-colored {label}",
    "a photo of a {color} object",
)
BACKGROUND = 0x99  # grey: #999 in each colour


class ClipColors:
    """Choose the colour whose texts are most like the picture of an object.

    Zero-shot classification, arXiv 2103.00020 section 3.1: a colour's vector is the mean of its
    templates' vectors, each of length 1.
    """

    def __init__(self, path: Path, device: torch.device) -> None:
        self._processor = load_image_processor(path)
        self._tokenizer = load_tokenizer(path)
        self._model = load_model(path, None)
        # label → [colours, channels], on the CPU. A run's prompts name few classes.
        self._texts: dict[str, Tensor] = {}
        self.to(device)

    def to(self, device: torch.device) -> None:
        self._device = device
        # The method of transformers is typed for another self.
        nn.Module.to(self._model, device)

    @torch.inference_mode()
    def names(self, image: np.ndarray, objects: Sequence[DetectedObject], label: str) -> list[str]:
        """Return a name of COLORS for each object of the image [H, W, 3] uint8 RGB."""
        if label not in self._texts:
            self._texts[label] = self._text_vectors(label)

        crops = [crop(image, detected) for detected in objects]
        inputs = self._processor(images=crops, return_tensors="pt")
        features = self._model.get_image_features(pixel_values=inputs.pixel_values.to(self._device))
        # Of any length: it scales an image's cosines alike.
        similarity = features.pooler_output.cpu() @ self._texts[label].T
        return [COLORS[index] for index in similarity.argmax(dim=1).tolist()]

    def _text_vectors(self, label: str) -> Tensor:
        texts = []
        for color in COLORS:
            texts += [template.format(color=color, label=label) for template in TEMPLATES]
        inputs = self._tokenizer(texts, padding=True, return_tensors="pt").to(self._device)
        features = F.normalize(self._model.get_text_features(**inputs).pooler_output.cpu(), dim=-1)
        means = features.view(len(COLORS), len(TEMPLATES), -1).mean(dim=1)
        return F.normalize(means, dim=-1)


def crop(image: np.ndarray, detected: DetectedObject) -> Image.Image:
    """Cut out an object; where its mask is known, the rest of its box becomes grey."""
    if detected.mask_HW is not None:
        image = np.where(detected.mask_HW[..., None], image, np.uint8(BACKGROUND))
    left, top, right, bottom = (round(side) for side in detected.box)
    # At least a pixel, which an object of no width would not have.
    box = (left, top, max(right, left + 1), max(bottom, top + 1))
    return Image.fromarray(image).crop(box)
