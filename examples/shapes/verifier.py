"""Find what a picture of the shapes world shows, and judge it by its caption (numpy and cv2).

The picture is resized so that its longer side is 192 pixels, three times the world's: one set of
lengths fits all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations

import cv2
import numpy as np

from examples.shapes.world import COLORS, SHAPES, SIZE, Caption, fill_shape, relation_holds

OTHER = "other"  # the colour of what stands out from the background in grey or pastel

# The least intersection over union with the ideal shape: a little below the worst of 1,400
# reconstructions by a tiny VAE (0.923, 0.899, 0.886, 0.797 and one broken triangle), which rounds
# corners and points. Refused are e.g. a pentagon as a circle (0.90), an ellipse of 4 : 5 (0.87), a
# rectangle of 4 : 5 (0.82), a triangle turned by 10° (0.81).
LEAST_OVERLAP = {"circle": 0.91, "square": 0.87, "triangle": 0.87, "star": 0.78}

_ZOOM = 3
# The hues of COLORS, in OpenCV's 0..179.
_HUES = {"red": 0, "yellow": 27, "green": 64, "cyan": 92, "blue": 116, "purple": 146}
_NO_COLOR = 255
# max − min of R, G, B: about half of an object's, so that a blurred edge stays where it was.
_LEAST_CHROMA = 84
_LEAST_CONTRAST = 60  # of OTHER, to the background's median
# Smaller blobs are specks; the smallest object (a star of four) has about 97 · _ZOOM**2.
_LEAST_AREA = 14 * _ZOOM**2
# What covers more of the picture has no shape: an all-red picture is no red square.
_LARGEST_FRACTION = 0.5
_NECK = 7  # bridges between objects thinner than this are cut, 2.3 pixels of a 64 × 64 picture
_GRID = 48  # cells a side of the grid on which blobs are compared, all with the same area
_GRID_AREA = 530 * 255  # cells × their value; a star of 530 cells is 42 wide
_MAX_MATCHED = 6  # blobs that are matched with a caption's objects, the largest ones

# Dense reward: so much counts a blob for an object that it is not quite.
_SHAPE_ONLY = 0.6
_COLOR_ONLY = 0.4
_NEITHER = 0.1
_RELATION_CREDIT = 0.3  # lost where the relation does not hold


@dataclass(frozen=True, kw_only=True)
class Detection:
    """Describe a blob. color: key of COLORS, or OTHER. shape: one of SHAPES, or None for no shape.

    x, y: centroid; with area, in pixels of the picture as given.
    """

    color: str
    shape: str | None
    x: float
    y: float
    area: float


@dataclass(frozen=True, kw_only=True)
class _Blob:
    """Hold one connected area. mask: uint8 [h, w] of 0 and 255.

    corner: its (left, top) in the resized picture. centroid: (x, y) in the mask; area: in pixels.
    """

    mask: np.ndarray
    corner: tuple[int, int]
    centroid: tuple[float, float]
    area: float


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Judge a picture.

    strict: it shows exactly the objects asked for and nothing else, and the relation holds.
    dense: in [0, 1], partial credit, 1.0 if and only if strict and at most 0.5 otherwise.
    """

    strict: bool
    dense: float


def verify(pixels: np.ndarray, caption: Caption) -> Verdict:
    """Judge pixels, uint8 [H, W, 3] RGB of any size. Raises ValueError for anything else."""
    return judge(detect(pixels), caption)


def judge(blobs: Sequence[Detection], caption: Caption) -> Verdict:
    """Match every object asked for with a blob so that the sum of their similarities is largest.

    dense = strict / 2 + m / 2, with m = sum of similarities / max(objects, blobs): objects too many
    cost as much as objects missing. Of m 30 % are lost where the relation asked for does not hold.
    """
    matched = _match(blobs, caption)
    total = _similarity_sum(matched, caption)
    credit = total / max(len(blobs), len(caption.objects))
    # A similarity of 1 for every object; sums of ones are exact.
    complete = len(blobs) == len(caption.objects) == total
    if caption.relation is not None and not _related(matched, caption.relation):
        credit = (1 - _RELATION_CREDIT) * credit
        complete = False
    return Verdict(strict=complete, dense=0.5 * complete + 0.5 * credit)


def detect(pixels: np.ndarray) -> list[Detection]:
    """Return the blobs, colour by colour, without specks. pixels: uint8 [H, W, 3] RGB."""
    _check_pixels(pixels)
    zoom = _ZOOM * SIZE / max(pixels.shape[:2])
    work = _resize(pixels, zoom)
    detections = []
    for color, mask in _masks(work):
        detections += [_detection(color, blob, work, zoom) for blob in _blobs(mask)]
    return detections


def _detection(color: str, blob: _Blob, work: np.ndarray, zoom: float) -> Detection:
    # A resized pixel's centre lies half a pixel inside its corner, before and after.
    x, y = ((corner + at + 0.5) / zoom - 0.5 for corner, at in zip(blob.corner, blob.centroid))
    is_object = blob.area <= _LARGEST_FRACTION * work.shape[0] * work.shape[1]
    shape = _shape(blob) if is_object else None
    return Detection(color=color, shape=shape, x=x, y=y, area=blob.area / zoom**2)


def _check_pixels(pixels: np.ndarray) -> None:
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or 0 in pixels.shape:
        raise ValueError(
            f"pixels are {pixels.dtype} {list(pixels.shape)}, must be uint8 [H, W, 3] RGB "
            "with H, W ≥ 1"
        )


def _resize(pixels: np.ndarray, zoom: float) -> np.ndarray:
    height, width = pixels.shape[:2]
    size = (max(1, round(width * zoom)), max(1, round(height * zoom)))
    return cv2.resize(pixels, size, interpolation=cv2.INTER_CUBIC if zoom > 1 else cv2.INTER_AREA)


def _masks(work: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (colour, uint8 [H, W] mask of 0 and 255) for colours that cover more than a speck."""
    red, green, blue = cv2.split(work)
    chroma = cv2.subtract(cv2.max(cv2.max(red, green), blue), cv2.min(cv2.min(red, green), blue))
    pale = cv2.compare(chroma, _LEAST_CHROMA, cv2.CMP_LE)
    hue = cv2.extractChannel(cv2.cvtColor(work, cv2.COLOR_RGB2HSV), 0)
    labels = cv2.bitwise_or(cv2.LUT(hue, _color_of_hue()), pale)  # 255, _NO_COLOR, where pale
    counts = cv2.calcHist([labels], [0], None, [256], [0, 256]).ravel()
    for index, color in enumerate(COLORS):
        if counts[index] >= _LEAST_AREA:
            yield color, cv2.compare(labels, index, cv2.CMP_EQ)
    if counts[_NO_COLOR] >= _LEAST_AREA:
        yield OTHER, _stands_out(work, pale)


def _stands_out(work: np.ndarray, pale: np.ndarray) -> np.ndarray:
    """Return the pale pixels that differ from the background, the median of all pale ones."""
    gray = cv2.cvtColor(work, cv2.COLOR_RGB2GRAY)
    cumulative = np.cumsum(cv2.calcHist([gray], [0], pale, [256], [0, 256]))
    background = int(np.searchsorted(cumulative, cumulative[-1] / 2))
    contrast = cv2.absdiff(gray, background)
    return cv2.bitwise_and(cv2.compare(contrast, _LEAST_CONTRAST, cv2.CMP_GT), pale)


def _blobs(mask: np.ndarray) -> Iterator[_Blob]:
    """Yield the connected areas of a mask (uint8 [H, W] of 0 and 255) that are no specks."""
    mask = cv2.morphologyEx(mask, cv2.MORPH_OPEN, _neck_kernel())
    contours, _ = cv2.findContours(mask, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE)
    for contour in contours:
        left, top, width, height = cv2.boundingRect(contour)
        if width * height < _LEAST_AREA:
            continue
        area_mask = np.zeros((height, width), np.uint8)
        cv2.drawContours(area_mask, [contour], 0, 255, cv2.FILLED, offset=(-left, -top))
        area_mask &= mask[top : top + height, left : left + width]  # keeps its holes
        moments = cv2.moments(area_mask, binaryImage=True)
        area = moments["m00"]
        if area >= _LEAST_AREA:
            centroid = (moments["m10"] / area, moments["m01"] / area)
            yield _Blob(mask=area_mask, corner=(left, top), centroid=centroid, area=area)


def _shape(blob: _Blob) -> str | None:
    """Return the shape with which the blob overlaps most, if that is enough."""
    overlaps = _overlaps(blob)
    best = SHAPES[int(overlaps.argmax())]
    return best if overlaps.max() >= LEAST_OVERLAP[best] else None


def _overlaps(blob: _Blob) -> np.ndarray:
    """Return float64 [len(SHAPES)]: intersection over union with each ideal shape."""
    seen = _on_grid(blob)
    ideal = _ideal_shapes()
    both = np.minimum(ideal, seen).sum(1)
    area = max(int(seen.sum()), _GRID_AREA)  # what reaches beyond the grid counts too
    return both / (ideal.sum(1) + area - both)


def _on_grid(blob: _Blob) -> np.ndarray:
    """Move the blob to the grid's centre and scale it to the grid's area. uint8 [_GRID · _GRID]."""
    scale = np.sqrt(_GRID_AREA / 255 / blob.area)
    x, y = blob.centroid
    middle = (_GRID - 1) / 2
    matrix = np.array([[scale, 0, middle - scale * x], [0, scale, middle - scale * y]])
    return cv2.warpAffine(blob.mask, matrix, (_GRID, _GRID), flags=cv2.INTER_LINEAR).ravel()


@cache
def _ideal_shapes() -> np.ndarray:
    """Return the grids of SHAPES as they are drawn. uint8 [len(SHAPES), _GRID · _GRID]."""
    grids = []
    for shape in SHAPES:
        canvas = np.zeros((_ZOOM * SIZE, _ZOOM * SIZE), np.uint8)
        middle = (_ZOOM * SIZE - 1) / 2
        fill_shape(canvas, shape, center=(middle, middle), radius=9.5 * _ZOOM, color=255)
        (blob,) = _blobs(cv2.compare(canvas, 127, cv2.CMP_GT))
        grids.append(_on_grid(blob))
    return np.stack(grids)


@cache
def _neck_kernel() -> np.ndarray:
    return cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (_NECK, _NECK))


@cache
def _color_of_hue() -> np.ndarray:
    """Return uint8 [256]: OpenCV hue → index of the nearest colour."""
    distance = np.abs(np.arange(256)[:, None] - list(_HUES.values()))
    return np.minimum(distance, np.abs(180 - distance)).argmin(1).astype(np.uint8)


def _match(blobs: Sequence[Detection], caption: Caption) -> tuple[Detection | None, ...]:
    """Return the blob for each of the caption's objects, None for those that go without.

    No blob serves twice.
    """
    largest = sorted(blobs, key=lambda blob: -blob.area)[:_MAX_MATCHED]
    missing = max(0, len(caption.objects) - len(largest))
    candidates = permutations([*largest, *[None] * missing], len(caption.objects))
    return max(candidates, key=lambda matched: _similarity_sum(matched, caption))


def _similarity_sum(matched: Sequence[Detection | None], caption: Caption) -> float:
    return sum(map(_similarity, matched, caption.objects))


def _similarity(seen: Detection | None, wanted: tuple[str | None, str]) -> float:
    """Return a number in [0, 1]. wanted: (colour or None for any, shape)."""
    if seen is None:
        return 0.0
    color, shape = wanted
    right_color = seen.color != OTHER if color is None else seen.color == color
    if seen.shape == shape:
        return 1.0 if right_color else _SHAPE_ONLY
    return _COLOR_ONLY if color is not None and right_color else _NEITHER


def _related(matched: Sequence[Detection | None], relation: str) -> bool:
    first, second = matched
    return None not in matched and relation_holds(relation, first.x - second.x, first.y - second.y)
