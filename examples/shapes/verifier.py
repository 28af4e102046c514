"""What a picture of the shapes world shows, and whether that is what its caption asks for (numpy and cv2).

The picture is resized so that its longer side is 192 pixels: three times the world's, so one set of lengths fits all.
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

# The least intersection over union with the ideal shape: a little below the worst of 1,400 reconstructions by a tiny VAE
# (0.923, 0.899, 0.886, 0.797 and one broken triangle), which rounds corners and points. Refused are e.g. a pentagon as a
# circle (0.90), an ellipse of 4 : 5 (0.87), a rectangle of 4 : 5 (0.82), a triangle turned by 10° (0.81).
LEAST_OVERLAP = {"circle": 0.91, "square": 0.87, "triangle": 0.87, "star": 0.78}

_ZOOM = 3
_HUES = {
    "red": 0,
    "yellow": 27,
    "green": 64,
    "cyan": 92,
    "blue": 116,
    "purple": 146,
}  # of COLORS, in OpenCV's 0..179
_NO_COLOR = 255
_LEAST_CHROMA = (
    84  # max − min of R, G, B; about half of an object's, so that a blurred edge stays where it was
)
_LEAST_CONTRAST = 60  # of OTHER, to the background's median
_LEAST_AREA = (
    14 * _ZOOM**2
)  # smaller blobs are specks; the smallest object (a star of four) has about 97 · _ZOOM**2
_LARGEST_SHARE = (
    0.5  # of the picture; what covers more has no shape: an all-red picture is no red square
)
_NECK = 7  # bridges between objects thinner than this are cut, 2.3 pixels of a 64 × 64 picture
_GRID = 48  # cells a side of the grid on which blobs are compared, all with the same area
_GRID_AREA = 530 * 255  # cells × their value; a star of 530 cells is 42 wide
_MAX_MATCHED = 6  # blobs that are matched with a caption's objects, the largest ones

# Dense reward: what a blob counts for an object that it is not quite.
_SHAPE_ONLY, _COLOR_ONLY, _NEITHER = 0.6, 0.4, 0.1
_RELATION_SHARE = 0.3


@dataclass(frozen=True, kw_only=True)
class Detection:
    """A blob. color: key of COLORS, or OTHER. shape: one of SHAPES, or None where it is none of them. x, y: centroid,
    and area, both in pixels of the picture as given."""

    color: str
    shape: str | None
    x: float
    y: float
    area: float


@dataclass(frozen=True, kw_only=True)
class _Blob:
    """mask: uint8 [h, w] of 0 and 255, whose corner (left, top) lies there in the resized picture. centroid: (x, y) in
    the mask, and area, in its pixels."""

    mask: np.ndarray
    corner: tuple[int, int]
    centroid: tuple[float, float]
    area: float


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """strict: the picture shows exactly the objects asked for and nothing else, and the relation holds.
    dense: in [0, 1], partial credit, 1.0 if and only if strict and at most 0.5 otherwise."""

    strict: bool
    dense: float


def verify(pixels: np.ndarray, caption: Caption) -> Verdict:
    """pixels: uint8 [H, W, 3] RGB of any size. ValueError for anything else, never for what it shows."""
    return judge(detect(pixels), caption)


def judge(found: Sequence[Detection], caption: Caption) -> Verdict:
    """Every object asked for is matched with a blob so that the sum of their similarities is largest.

    dense = strict / 2 + m / 2, with m = sum of similarities / max(objects, blobs), of which 30 % are lost where a
    relation is asked for and the matched blobs do not have it: objects too many cost as much as objects missing.
    """
    matched = _match(found, caption)
    total = sum(
        _similarity(each, wanted)
        for each, wanted in zip(matched, caption.objects)
        if each is not None
    )
    credit = total / max(len(found), len(caption.objects))
    complete = (
        len(found) == len(caption.objects) == total
    )  # a similarity of 1 each; sums of ones are exact
    if caption.relation is not None and not _related(matched, caption.relation):
        credit, complete = (1 - _RELATION_SHARE) * credit, False
    return Verdict(strict=complete, dense=0.5 * complete + 0.5 * credit)


def detect(pixels: np.ndarray) -> list[Detection]:
    """The blobs of one colour, by colour; specks are left out. pixels: uint8 [H, W, 3] RGB of any size."""
    _check_pixels(pixels)
    zoom = _ZOOM * SIZE / max(pixels.shape[:2])
    work = _resize(pixels, zoom)
    return [
        _detection(color, blob, work, zoom) for color, mask in _masks(work) for blob in _blobs(mask)
    ]


def _detection(color: str, blob: _Blob, work: np.ndarray, zoom: float) -> Detection:
    # A resized pixel's centre lies half a pixel inside its corner, before and after.
    x, y = ((corner + at + 0.5) / zoom - 0.5 for corner, at in zip(blob.corner, blob.centroid))
    is_object = blob.area <= _LARGEST_SHARE * work.shape[0] * work.shape[1]
    return Detection(
        color=color, shape=_shape(blob) if is_object else None, x=x, y=y, area=blob.area / zoom**2
    )


def _check_pixels(pixels: np.ndarray) -> None:
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or 0 in pixels.shape:
        raise ValueError(
            f"pixels are {pixels.dtype} {list(pixels.shape)}, must be uint8 [H, W, 3] RGB with H, W ≥ 1"
        )


def _resize(pixels: np.ndarray, zoom: float) -> np.ndarray:
    height, width = pixels.shape[:2]
    size = (max(1, round(width * zoom)), max(1, round(height * zoom)))
    return cv2.resize(pixels, size, interpolation=cv2.INTER_CUBIC if zoom > 1 else cv2.INTER_AREA)


def _masks(work: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """(colour, uint8 [H, W] mask of 0 and 255) for each colour that covers more than a speck, and for OTHER."""
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
    """The pale pixels that differ from the background's level, which is the median of all pale ones."""
    gray = cv2.cvtColor(work, cv2.COLOR_RGB2GRAY)
    cumulative = np.cumsum(cv2.calcHist([gray], [0], pale, [256], [0, 256]))
    background = int(np.searchsorted(cumulative, cumulative[-1] / 2))
    contrast = cv2.absdiff(gray, background)
    return cv2.bitwise_and(cv2.compare(contrast, _LEAST_CONTRAST, cv2.CMP_GT), pale)


def _blobs(mask: np.ndarray) -> Iterator[_Blob]:
    """The connected parts of a mask (uint8 [H, W] of 0 and 255) that are no specks."""
    mask = cv2.morphologyEx(mask, cv2.MORPH_OPEN, _neck_kernel())
    contours, _ = cv2.findContours(mask, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE)
    for contour in contours:
        left, top, width, height = cv2.boundingRect(contour)
        if width * height < _LEAST_AREA:
            continue
        part = np.zeros((height, width), np.uint8)
        cv2.drawContours(part, [contour], 0, 255, cv2.FILLED, offset=(-left, -top))
        part &= mask[top : top + height, left : left + width]  # its holes
        moments = cv2.moments(part, binaryImage=True)
        area = moments["m00"]
        if area >= _LEAST_AREA:
            centroid = (moments["m10"] / area, moments["m01"] / area)
            yield _Blob(mask=part, corner=(left, top), centroid=centroid, area=area)


def _shape(blob: _Blob) -> str | None:
    """The shape with which the blob overlaps most, if that is enough."""
    overlaps = _overlaps(blob)
    best = SHAPES[int(overlaps.argmax())]
    return best if overlaps.max() >= LEAST_OVERLAP[best] else None


def _overlaps(blob: _Blob) -> np.ndarray:
    """Intersection over union with each ideal shape of the same area and centroid. float64 [len(SHAPES)]."""
    seen, ideal = _on_grid(blob), _ideal_shapes()
    both = np.minimum(ideal, seen).sum(1)
    area = max(int(seen.sum()), _GRID_AREA)  # what reaches beyond the grid counts too
    return both / (ideal.sum(1) + area - both)


def _on_grid(blob: _Blob) -> np.ndarray:
    """The blob moved to the grid's centre and scaled to the grid's area. uint8 [_GRID · _GRID]; holes stay holes."""
    scale = np.sqrt(_GRID_AREA / 255 / blob.area)
    (x, y), middle = blob.centroid, (_GRID - 1) / 2
    matrix = np.array([[scale, 0, middle - scale * x], [0, scale, middle - scale * y]])
    return cv2.warpAffine(blob.mask, matrix, (_GRID, _GRID), flags=cv2.INTER_LINEAR).ravel()


@cache
def _ideal_shapes() -> np.ndarray:
    """The grids of SHAPES as the generator draws them, seen as blobs are seen. uint8 [len(SHAPES), _GRID · _GRID]."""
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
    """OpenCV hue → index of the nearest colour. uint8 [256]."""
    distance = np.abs(np.arange(256)[:, None] - list(_HUES.values()))
    return np.minimum(distance, np.abs(180 - distance)).argmin(1).astype(np.uint8)


def _match(found: Sequence[Detection], caption: Caption) -> tuple[Detection | None, ...]:
    """The blob for each of the caption's objects, None for those that go without; no blob serves twice."""
    largest = sorted(found, key=lambda each: -each.area)[:_MAX_MATCHED]
    missing = max(0, len(caption.objects) - len(largest))
    candidates = permutations([*largest, *[None] * missing], len(caption.objects))
    return max(
        candidates,
        key=lambda chosen: sum(
            _similarity(each, wanted) for each, wanted in zip(chosen, caption.objects)
        ),
    )


def _similarity(seen: Detection | None, wanted: tuple[str | None, str]) -> float:
    """In [0, 1]. wanted: (colour or None for any, shape)."""
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
