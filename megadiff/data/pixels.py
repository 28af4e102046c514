"""Turn a file's bytes into uint8 RGB of the size that is trained on."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

# Pillow raises these for bytes that are no image, that are cut short or damaged, and for an image
# of more pixels than its limit.
DECODE_FAULTS = (
    UnidentifiedImageError,
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    struct.error,
    Image.DecompressionBombError,
)
ENLARGED = 2.0  # sides grown by more than this are counted as enlarged: they teach the model blur


def decode(data: bytes, *, where: str) -> np.ndarray:
    """Return uint8 [H, W, 3] RGB, as a viewer shows the file.

    Turned as EXIF says; transparency over white; 16-bit grey scaled to 8 bits; the first frame of
    an animation. Colour profiles are not applied. where: names the image in errors.
    Raises ValueError for bytes that are no image or cut short, and for 32-bit samples.
    """
    try:
        image = Image.open(io.BytesIO(data))  # lazy: most faults show when the pixels are read
        return np.asarray(_rgb(ImageOps.exif_transpose(image)))
    except DECODE_FAULTS as error:
        raise ValueError(
            f"{where}: {len(data)} bytes that are no readable image ({error}); replace or remove it"
        ) from error


def read_image(path: Path | str) -> np.ndarray:
    """Return uint8 [H, W, 3] of a file, as decode() does.

    Raises ValueError where there is no file and for what decode() refuses.
    """
    file = Path(path)
    try:
        # a pipe or a device would never end
        if file.exists() and not file.is_file():
            raise OSError(f"{path} is no file")
        data = file.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise ValueError(
            f"the image cannot be read ({error}); put it there, or mend the row"
        ) from error

    return decode(data, where=str(path))


def scale(pixels_HWC: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resample the whole image to uint8 [height, width, 3] by Lanczos, as diffusers' processors.

    An image of that size is returned as it is.
    """
    if pixels_HWC.shape[:2] == (height, width):
        return pixels_HWC
    image = Image.fromarray(np.ascontiguousarray(pixels_HWC))
    return np.asarray(image.resize((width, height), Image.Resampling.LANCZOS))


def fit(pixels_HWC: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resample the largest centred part of the wanted shape to exactly uint8 [height, width, 3].

    Lanczos, with the support that avoids aliasing. Lost are both ends of the side that is too long
    for the shape, and detail finer than the new pixels. An image of that size is returned as it is.
    """
    if pixels_HWC.shape[:2] == (height, width):
        return pixels_HWC

    scale = _scale(pixels_HWC, height, width)
    rows, columns = pixels_HWC.shape[:2]
    top = (rows - height / scale) / 2
    left = (columns - width / scale) / 2

    # Rounding may put an edge a little outside of the image, which Pillow refuses.
    box = (max(left, 0.0), max(top, 0.0), min(columns - left, columns), min(rows - top, rows))
    image = Image.fromarray(np.ascontiguousarray(pixels_HWC))
    return np.asarray(image.resize((width, height), Image.Resampling.LANCZOS, box=box))


def is_enlarged(pixels_HWC: np.ndarray, height: int, width: int) -> bool:
    """Say whether fit() makes more than ENLARGED pixels of one, along each side."""
    return _scale(pixels_HWC, height, width) > ENLARGED


def _scale(pixels_HWC: np.ndarray, height: int, width: int) -> float:
    """Return new pixels per old one, such that the image covers height × width."""
    return max(height / pixels_HWC.shape[0], width / pixels_HWC.shape[1])


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode in ("I", "F"):
        raise ValueError(
            f"samples of 32 bits (mode {image.mode}) have no agreed range; "
            "save it with 8 or 16 bits"
        )

    if image.mode.startswith("I;16"):  # Pillow's own conversion to 8 bits clips at 255
        levels = np.asarray(image).astype(np.uint32)
        # Adding half of 65535 rounds to the nearest level. The product needs more than 16 bits.
        image = Image.fromarray(((levels * 255 + 32767) // 65535).astype(np.uint8))

    if image.has_transparency_data:
        image = image.convert("RGBA")
        # Alpha is blended here: convert("RGB") alone would drop it and show what it hides.
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")
