"""Run the CenterNet of assets/detector: 80 COCO classes, 4 MB, a fifth of a second on a core.

Zhou et al., "Objects as Points", arXiv 1904.07850, on MobileNetV3. tools/convert_centernet.py made
the folder: a list of operators, and their weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

GRAPH = "graph.json"
SIZE = 512  # pixels a side of the network's input
STRIDE = 4  # input pixels to a cell of the heat map
MAX_PEAKS = 100
# Neighbouring peaks show one object several times: the horse of the tests three times over 0.3.
MAX_OVERLAP = 0.5


class CenterNet:
    """Interpret the operators of graph.json. Weights are float32, the images' layout is NCHW."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._graph = json.loads((folder / GRAPH).read_text("utf-8"))
        self.labels: list[str] = self._graph["labels"]
        weights = load_file(folder / "weights.safetensors")
        self._weights = {name: weight.float() for name, weight in weights.items()}
        self.to(device)

    def to(self, device: torch.device) -> None:
        """Move the weights."""
        self._device = device
        self._weights = {name: weight.to(device) for name, weight in self._weights.items()}

    def _run(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return heat [80, H, W] in (0, 1) and sizes [4, H, W] of one image [1, 3, 512, 512].

        images: levels 0 … 255, RGB. sizes: from a cell to its object's left, top, right and bottom.
        """
        values = {self._graph["image"]: images}
        for step in self._graph["steps"]:
            # Numbers stand for themselves.
            inputs = [values[name] if isinstance(name, str) else name for name in step["inputs"]]
            if step["op"] == "conv":
                values[step["output"]] = self._convolve(inputs[0], step)
            else:
                values[step["output"]] = OPERATORS[step["op"]](*inputs)
        return values[self._graph["heat"]][0], values[self._graph["sizes"]][0]

    def _convolve(self, x: Tensor, step: dict[str, Any]) -> Tensor:
        kernel = self._weights[f"{step['output']}.kernel"]
        y = F.conv2d(
            _pad_same(x, kernel.shape[-1], step["stride"]),
            kernel,
            self._weights.get(f"{step['output']}.bias"),
            stride=step["stride"],
            groups=x.shape[1] if step["depthwise"] else 1,
        )
        return y.relu() if step["relu"] else y

    @torch.inference_mode()
    def detect(self, pixels: np.ndarray) -> list[tuple[int, float, Tensor]]:
        """Return (label, score, box) of an image [H, W, 3] uint8, the surest first.

        box: left, top, right, bottom in the image's pixels.
        """
        resized = Image.fromarray(pixels).resize((SIZE, SIZE), Image.Resampling.BILINEAR)
        image = torch.from_numpy(np.array(resized, np.float32)).permute(2, 0, 1)[None]
        heat, sizes = (part.cpu() for part in self._run(image.to(self._device)))

        # A peak is a cell that no neighbour exceeds.
        is_peak = heat == F.max_pool2d(heat[None], 3, stride=1, padding=1)[0]
        scores, flat = (heat * is_peak).flatten().topk(MAX_PEAKS)
        labels, rows, columns = torch.unravel_index(flat, heat.shape)

        cells = STRIDE * torch.stack([columns, rows, columns, rows])
        signs = torch.tensor([[-1], [-1], [1], [1]])
        boxes = (cells + signs * sizes[:, rows, columns]).T
        height, width, _ = pixels.shape
        boxes = boxes * (torch.tensor([width, height, width, height]) / SIZE)

        peaks: list[tuple[int, float, Tensor]] = []
        for label, score, box in zip(labels.tolist(), scores.tolist(), boxes, strict=True):
            others = [other for peak_label, _, other in peaks if peak_label == label]
            if all(_overlap(box, other) < MAX_OVERLAP for other in others):
                peaks.append((label, score, box))
        return peaks


def _pad_same(x: Tensor, kernel_size: int, stride: int) -> Tensor:
    """Pad as TensorFlow's SAME: the odd pixel goes right and below, torch's own would be even."""
    padding = []
    for size in (x.shape[3], x.shape[2]):
        total = max((-(-size // stride) - 1) * stride + kernel_size - size, 0)
        padding += [total // 2, total - total // 2]
    return F.pad(x, padding)


def _double(x: Tensor) -> Tensor:
    """Double height and width as TensorFlow 1 does: pixel i of the result is at i / 2 of x."""
    height, width = x.shape[2:]
    # With one more row and column, torch's aligned corners put every pixel there.
    padded = F.pad(x, (0, 1, 0, 1), mode="replicate")
    size = (2 * height + 1, 2 * width + 1)
    y = F.interpolate(padded, size, mode="bilinear", align_corners=True)
    return y[:, :, :-1, :-1]


def _overlap(a: Tensor, b: Tensor) -> float:
    """Return the intersection of two boxes over their union."""
    sides = (torch.minimum(a[2:], b[2:]) - torch.maximum(a[:2], b[:2])).clamp(min=0)
    common = sides.prod()
    union = (a[2:] - a[:2]).prod() + (b[2:] - b[:2]).prod() - common
    return float(common / union)


OPERATORS: dict[str, Callable[..., Tensor]] = {
    "add": lambda a, b: a + b,
    "concat": lambda *parts: torch.cat(parts, dim=1),
    "double": _double,
    "identity": lambda x: x,
    "mean": lambda x: x.mean(dim=(2, 3), keepdim=True),
    "mul": lambda a, b: a * b,
    "relu": F.relu,
    "relu6": F.relu6,
    "sigmoid": torch.sigmoid,
}
