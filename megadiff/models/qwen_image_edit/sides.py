"""Sizes that given images get."""

from __future__ import annotations

import math

PICTURE_PIXELS = 384 * 384  # to which a picture is scaled for the text encoder
SIDE_MULTIPLE = 32
MOST_RATIO = 200  # of a picture's sides; transformers' Qwen2VLImageProcessor refuses more


def sides_of_area(height: int, width: int, pixels: int) -> tuple[int, int]:
    """Return (height, width) of about so many pixels in the shape of another size.

    Multiples of SIDE_MULTIPLE, as the pipelines' calculate_dimensions gives them. Raises ValueError
    for a shape whose shorter side would be none.
    """
    ratio = width / height
    new_width = math.sqrt(pixels * ratio)
    new_height = new_width / ratio
    sides = (round(new_height / SIDE_MULTIPLE), round(new_width / SIDE_MULTIPLE))
    if not min(sides):
        raise ValueError(
            f"a given image has {width}x{height} pixels; scaled to an area of {pixels} pixels its "
            f"shorter side has less than {SIDE_MULTIPLE // 2}, need as many; crop it"
        )
    return sides[0] * SIDE_MULTIPLE, sides[1] * SIDE_MULTIPLE


def picture_sides(height: int, width: int) -> tuple[int, int]:
    """Return (height, width) of a picture as the text encoder sees it.

    Raises ValueError for one whose sides it cannot take.
    """
    sides = sides_of_area(height, width, PICTURE_PIXELS)
    if max(sides) > MOST_RATIO * min(sides):
        raise ValueError(
            f"a given image has {width}x{height} pixels; for the text encoder one side may be at "
            f"most {MOST_RATIO} times the other; crop it"
        )
    return sides
