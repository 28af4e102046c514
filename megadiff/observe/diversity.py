"""How different the samples of one prompt are, and the looks that an exploited reward tends to leave on them.

Pixels are uint8 [N, H, W, 3], array or tensor: the N samples of one prompt, a video as its frames side by side. All
figures but `clipped_share` look at thumbnails, so that they cost about the same at any resolution.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from PIL import Image
from torch import Tensor

THUMBNAIL = 32  # pixels, the least side that an image is shrunk to
HUE_BINS = 12  # 30° each, around red, orange, yellow, …
SATURATED, BRIGHT = 64, 51  # of 255: below, a pixel has no hue worth counting
COLOURED_SHARE = 0.005  # of a sample's pixels: with fewer saturated ones it counts as colourless
_COLOURS = re.compile(
    r"\b(red|crimson|scarlet|maroon|orange|amber|brown|golden|gold|beige|yellow|olive|lime|green|teal|turquoise|cyan|blue|"
    r"navy|azure|indigo|violet|purple|magenta|lilac|pink|colou?rful|rainbow)\b|[红橙黄绿青蓝紫粉棕金]",
    re.IGNORECASE,
)


def latent_spread(latents_NLC: Tensor) -> float:
    """Mean over pairs of samples of their RMS distance, in the latents' units; NaN for fewer than two samples."""
    return _mean_pairwise_rms(latents_NLC.detach().flatten(1).float())


def pixel_spread(pixels: ArrayLike | Tensor) -> float:
    """Mean over pairs of samples of the RMS distance of their thumbnails, in [0, 1]; NaN for fewer than two samples."""
    return _mean_pairwise_rms(torch.from_numpy(thumbnails(pixels)).flatten(1).float() / 255)


def _mean_pairwise_rms(samples_NK: Tensor) -> float:
    count, size = samples_NK.shape
    if count < 2:
        return math.nan
    return float(torch.pdist(samples_NK).double().mean()) / size**0.5


def names_a_colour(text: str) -> bool:
    """Whether a prompt names a hue, in English or Chinese (black, white and grey are none). Such prompts say nothing about
    a policy's diversity of colour: theirs falls as the policy learns to paint what was asked for."""
    return _COLOURS.search(text) is not None


def colour_entropy_bit(groups: Sequence[ArrayLike | Tensor]) -> float:
    """Diversity of colour among the samples of one prompt, in bits, mean over prompts; NaN without a group of two.

    Of each group it is the mutual information of sample and hue: the entropy of the hues of all samples pooled, less
    the mean entropy of each sample's own. So an image of many colours adds nothing (its own entropy is taken off);
    samples of one colour each, evenly drawn from k, give log2 k, and at most log2 of the group's size. It falls towards 0
    as a policy paints every "a circle" red, which the entropy of all pixels would not show while other prompts still
    ask for other colours. Every sample has the same say, however large its object.

    Leave out prompts that name their colour (`names_a_colour`). They have none by right, but a policy that still gets
    colours wrong has some: measured on shapes, where nine in ten prompts name theirs, the mean over all prompts
    falls from 0.58 bit to 0.11 as a policy becomes perfect and stays diverse; over the others it is 1.5 and 1.6.
    """
    bits = [_information_bit(hue_histogram(pixels)) for pixels in groups if len(pixels) > 1]
    return float(np.mean(bits)) if bits else math.nan


def _information_bit(shares_NB: NDArray) -> float:
    """Mutual information of row and bin, rows being equally likely, in bits."""
    return float(_entropy_bit(shares_NB.mean(axis=0)) - _entropy_bit(shares_NB).mean())


def _entropy_bit(shares: NDArray) -> NDArray:
    """Entropy over the last axis, which sums to 1."""
    return -(shares * np.log2(shares, where=shares > 0, out=np.zeros_like(shares))).sum(axis=-1)


def hue_histogram(pixels: ArrayLike | Tensor) -> NDArray[np.float64]:
    """[N, HUE_BINS + 1]: share of each sample's saturated pixels at each hue, rows sum to 1. The last bin is all of a
    sample that has no colour.

    A pixel is shared between the two nearest bins in proportion, or a hue that happens to lie on an edge would jump
    between them at the least change and look like two colours.
    """
    hue_NK, saturation_NK, value_NK = _hsv(pixels)
    is_coloured_NK = (saturation_NK >= SATURATED) & (value_NK >= BRIGHT)
    count, size = hue_NK.shape
    places = (hue_NK + np.arange(count)[:, None] * 256)[is_coloured_NK]
    levels_NV = np.bincount(places, minlength=count * 256).reshape(count, 256)
    counts_NB = levels_NV @ _BIN_SHARES
    total_N = counts_NB.sum(axis=1)
    is_grey_N = total_N < COLOURED_SHARE * size
    shares_NB = np.where(is_grey_N[:, None], 0.0, counts_NB / np.maximum(total_N, 1)[:, None])
    return np.concatenate([shares_NB, is_grey_N[:, None]], axis=1)


def _bin_shares() -> NDArray[np.float64]:
    """[256, HUE_BINS]: how a hue in 256ths of the circle is shared between the bins; rows sum to 1."""
    place = np.arange(256) * HUE_BINS / 256
    distance = np.abs(place[:, None] - np.arange(HUE_BINS))
    return np.maximum(0.0, 1.0 - np.minimum(distance, HUE_BINS - distance))


_BIN_SHARES = _bin_shares()


def saturation(pixels: ArrayLike | Tensor) -> float:
    """Mean HSV saturation, in [0, 1]: lurid pictures are a common way to please a reward."""
    red, green, blue = np.moveaxis(thumbnails(pixels), -1, 0)
    high, low = np.maximum(np.maximum(red, green), blue), np.minimum(np.minimum(red, green), blue)
    return float(((high - low) / np.maximum(high, 1).astype(np.float32)).mean())


def clipped_share(pixels: ArrayLike | Tensor) -> float:
    """Share of the channel values that are 0 or 255: what a decoder makes of latents driven out of its range."""
    array = _uint8(pixels)
    clipped = sum(int(np.count_nonzero(image + np.uint8(1) < 2)) for image in array)  # 255 + 1 wraps to 0
    return clipped / array.size


def _hsv(pixels: ArrayLike | Tensor) -> tuple[NDArray, NDArray, NDArray]:
    """Hue, saturation and value of the thumbnails in 0 … 255, each [N, pixels]."""
    small = thumbnails(pixels)
    hsv = np.asarray(Image.fromarray(small.reshape(-1, *small.shape[2:])).convert("HSV")).reshape(len(small), -1, 3)
    return hsv[..., 0], hsv[..., 1], hsv[..., 2]


def thumbnails(pixels: ArrayLike | Tensor) -> NDArray[np.uint8]:
    """[N, h, w, 3]: both sides shrunk by whole factors to below 2·THUMBNAIL, each pixel the mean of the area it covers.

    Thumbnails are their own thumbnails, so that who wants several figures shrinks once. Rows and columns that a factor
    leaves over are cut off.
    """
    array = _uint8(pixels)
    factors = [max(1, side // THUMBNAIL) for side in array.shape[1:3]]
    if factors == [1, 1]:
        return array
    height, width = (side // factor for side, factor in zip(array.shape[1:3], factors))
    whole = np.ascontiguousarray(array[:, : height * factors[0], : width * factors[1]])
    tall = Image.fromarray(whole.reshape(-1, *whole.shape[2:]))  # one image below the other: one call for all
    return np.array(tall.reduce((factors[1], factors[0]))).reshape(len(array), height, width, 3)


def _uint8(pixels: ArrayLike | Tensor) -> NDArray[np.uint8]:
    array = pixels.detach().cpu().numpy() if isinstance(pixels, Tensor) else np.asarray(pixels)
    if array.dtype != np.uint8 or array.ndim != 4 or array.shape[-1] != 3 or not array.size:
        raise ValueError(
            f"pixels are {array.dtype} {list(array.shape)}, not uint8 [N, H, W, 3] with N ≥ 1; convert them first"
        )
    return array
