"""Find objects in images, by a local folder's detection or instance segmentation model.

The one module that knows transformers' detectors (5.14): their processors, their answers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from PIL import Image
from torch import Tensor
from transformers.models.auto import modeling_auto

from megadiff.rewards import centernet

# Of AutoModelForUniversalSegmentation those with a class and a mask for each query.
SEGMENTATION = {"Mask2FormerForUniversalSegmentation", "MaskFormerForInstanceSegmentation"}
BATCH_SIZE = 8  # images at once: 100 masks for each are in memory

# The names in labels of models and in GenEval's rows → GenEval's. "mouse" is COCO's own; RT-DETR's
# folders have the names of Pascal VOC.
GENEVAL_NAMES = {
    "mouse": "computer mouse",
    "remote": "tv remote",
    "keyboard": "computer keyboard",
    "motorbike": "motorcycle",
    "aeroplane": "airplane",
    "sofa": "couch",
    "pottedplant": "potted plant",
    "diningtable": "dining table",
    "tvmonitor": "tv",
    "hair dryer": "hair drier",
}


@dataclass(frozen=True, kw_only=True)
class DetectedObject:
    """Describe an object in an image.

    label: its class, in GenEval's words. score: in [0, 1].
    box: left, top, right, bottom in pixels, within the image.
    mask_HW: bool, the object's pixels; None from a model that has boxes only.
    """

    label: str
    score: float
    box: tuple[float, float, float, float]
    mask_HW: np.ndarray | None = None


class Detector(Protocol):
    """Find objects."""

    def detect(
        self, images: Sequence[np.ndarray], *, threshold: float
    ) -> list[list[DetectedObject]]:
        """Return the objects that score more than threshold in images [H, W, 3] uint8 RGB."""

    def to(self, device: torch.device) -> None:
        """Move the weights."""


def geneval_name(label: str) -> str:
    """Return GenEval's word for a class."""
    return GENEVAL_NAMES.get(label, label)


def folder_labels(path: Path) -> frozenset[str]:
    """Return the classes that the folder's model knows, in GenEval's words; loads no weights.

    Raises ValueError where the folder has no model, or one of another kind.
    """
    if (path / centernet.GRAPH).is_file():
        labels = json.loads((path / centernet.GRAPH).read_text("utf-8"))["labels"]
    else:
        labels = _config(path).id2label.values()
    return frozenset(geneval_name(label) for label in labels)


def load_detector(path: Path, device: torch.device) -> Detector:
    """Load the folder's model onto the device. Raises ValueError as folder_labels does."""
    if (path / centernet.GRAPH).is_file():
        return CenterNetDetector(path, device)
    return TransformersDetector(path, device)


class CenterNetDetector:
    """Run the detector of assets/detector."""

    def __init__(self, path: Path, device: torch.device) -> None:
        self._model = centernet.CenterNet(path, device)
        self.to = self._model.to

    def detect(
        self, images: Sequence[np.ndarray], *, threshold: float
    ) -> list[list[DetectedObject]]:
        answers = []
        for image in images:
            peaks = self._model.detect(image)
            objects = [
                DetectedObject(
                    label=geneval_name(self._model.labels[label]),
                    score=score,
                    box=_within(box, image),
                )
                for label, score, box in peaks
                if score > threshold
            ]
            answers.append(objects)
        return answers


class TransformersDetector:
    """Run a model of AutoModelForObjectDetection, or one of SEGMENTATION."""

    def __init__(self, path: Path, device: torch.device) -> None:
        # From its module: the package's own door to this class asks for torchvision, which the
        # pil processors do without.
        from transformers.models.auto.image_processing_auto import AutoImageProcessor

        config = _config(path)
        self._has_masks = not _is_object_detection(config)
        auto = (
            transformers.AutoModelForUniversalSegmentation
            if self._has_masks
            else transformers.AutoModelForObjectDetection
        )
        # pil: a machine with torchvision would resize, and score, differently.
        self._processor = AutoImageProcessor.from_pretrained(
            path, backend="pil", local_files_only=True
        )
        # Mask2Former asks for scipy, which only its training's loss needs.
        module = sys.modules[getattr(transformers, config.architectures[0]).__module__]
        with patch.object(module, "requires_backends", lambda *_: None, create=True):
            # Its report, since missing tensors get random values with no more than a warning.
            self._model, report = auto.from_pretrained(
                path, dtype=torch.float32, local_files_only=True, output_loading_info=True
            )
        missing = sorted(report["missing_keys"])
        if missing:
            raise ValueError(
                f"path={path} lacks {len(missing)} of its model's tensors, the first is "
                f"{missing[0]}; fetch the whole folder"
            )
        self._names = {
            number: geneval_name(label) for number, label in self._model.config.id2label.items()
        }
        self.to(device)

    def to(self, device: torch.device) -> None:
        self._device = device
        self._model.to(device)

    @torch.inference_mode()
    def detect(
        self, images: Sequence[np.ndarray], *, threshold: float
    ) -> list[list[DetectedObject]]:
        answers: list[list[DetectedObject]] = []
        for start in range(0, len(images), BATCH_SIZE):
            batch = images[start : start + BATCH_SIZE]
            inputs = self._processor(
                images=[Image.fromarray(image) for image in batch], return_tensors="pt"
            )
            # Without the mask of padding: a group's images are of one size.
            outputs = self._model(pixel_values=inputs["pixel_values"].to(self._device))
            read = self._from_masks if self._has_masks else self._from_boxes
            answers += read(outputs, batch, threshold)
        return answers

    def _from_boxes(
        self, outputs: Any, images: Sequence[np.ndarray], threshold: float
    ) -> list[list[DetectedObject]]:
        """Read a batch's outputs as the model's own processor does."""
        # A few numbers, and processors differ in what they expect on which device.
        on_cpu = SimpleNamespace(logits=outputs.logits.cpu(), pred_boxes=outputs.pred_boxes.cpu())
        sizes = torch.tensor([image.shape[:2] for image in images])
        results = self._processor.post_process_object_detection(
            on_cpu, threshold=threshold, target_sizes=sizes
        )
        answers = []
        for result, image in zip(results, images, strict=True):
            rows = zip(result["labels"].tolist(), result["scores"].tolist(), result["boxes"])
            answers.append(
                [
                    DetectedObject(label=self._names[label], score=score, box=_within(box, image))
                    for label, score, box in rows
                ]
            )
        return answers

    def _from_masks(
        self, outputs: Any, images: Sequence[np.ndarray], threshold: float
    ) -> list[list[DetectedObject]]:
        """Read a batch's outputs, on their device and only for classes that can pass.

        Its processor would blow up all 100 masks of each image first. A score is the class's
        probability times the mean probability of the mask's pixels, as in mmdetection.
        """
        # The last class is that of no object.
        probabilities_NQC = outputs.class_queries_logits.softmax(dim=-1)[..., :-1]
        answers = []
        for number, image in enumerate(images):
            queries, labels = (probabilities_NQC[number] > threshold).nonzero(as_tuple=True)
            objects = []
            for query, label in zip(queries.tolist(), labels.tolist(), strict=True):
                logits = outputs.masks_queries_logits[number, query][None, None]
                pixels_HW = F.interpolate(logits, image.shape[:2], mode="bilinear")[0, 0].sigmoid()
                mask_HW = pixels_HW > 0.5
                # 0 for an empty mask.
                certainty = pixels_HW[mask_HW].sum() / mask_HW.sum().clamp(min=1)
                score = float(probabilities_NQC[number, query, label] * certainty)
                if score > threshold:
                    objects.append(self._masked(label, score, mask_HW.cpu().numpy()))
            answers.append(objects)
        return answers

    def _masked(self, label: int, score: float, mask_HW: np.ndarray) -> DetectedObject:
        """Draw the box around a mask's pixels."""
        rows = np.flatnonzero(mask_HW.any(axis=1))
        columns = np.flatnonzero(mask_HW.any(axis=0))
        box = (float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1))
        return DetectedObject(label=self._names[label], score=score, box=box, mask_HW=mask_HW)


def _config(path: Path) -> Any:
    """Return the transformers config of a detector's folder. Raises ValueError for others."""
    if not (path / "config.json").is_file():
        raise ValueError(
            f"path={path} holds neither config.json (a transformers model) nor "
            f"{centernet.GRAPH} (as assets/detector does); give a detector's folder"
        )

    config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    is_segmentation = not SEGMENTATION.isdisjoint(config.architectures or [])
    if not is_segmentation and not _is_object_detection(config):
        raise ValueError(
            f"path={path} holds {', '.join(config.architectures or ['no architecture'])}, which is "
            "neither for object detection nor for instance segmentation; give a model such as "
            "DETR, RT-DETR, YOLOS or Mask2Former"
        )
    return config


def _is_object_detection(config: Any) -> bool:
    names = set(modeling_auto.MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES.values())
    return not names.isdisjoint(config.architectures or [])


def _within(box: Tensor, image: np.ndarray) -> tuple[float, float, float, float]:
    """Clip a box to its image [H, W, 3]."""
    height, width, _ = image.shape
    sides = np.clip(box.tolist(), 0.0, [width, height, width, height])
    left, top, right, bottom = sides.tolist()
    return left, top, right, bottom
