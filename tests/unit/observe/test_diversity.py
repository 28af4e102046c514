import colorsys
import math

import numpy as np
import pytest
import torch

from megadiff.observe.diversity import (
    clipped_share,
    colour_entropy_bit,
    hue_histogram,
    latent_spread,
    motion,
    names_a_colour,
    pixel_spread,
    saturation,
    thumbnails,
)


def disc(*hues: float, size: int = 64, saturation: float = 0.9) -> np.ndarray:
    """uint8 [size, size, 3]: a disc on white, cut into equal slices of the hues (fractions of the
    circle).
    """
    axis = np.linspace(-1, 1, size)
    x, y = np.meshgrid(axis, axis)
    part = ((np.arctan2(y, x) / (2 * np.pi) + 0.5) * len(hues)).astype(int).clip(0, len(hues) - 1)
    colours = np.array([colorsys.hsv_to_rgb(hue, saturation, 0.9) for hue in hues])
    return (np.where((x**2 + y**2 < 0.4)[..., None], colours[part], 0.95) * 255).astype(np.uint8)


def group(*images: np.ndarray) -> np.ndarray:
    return np.stack(images)


SIX = [number / 6 for number in range(6)]


def test_samples_of_k_colours_have_log2_k_bit():
    for k in (1, 2, 3, 6):
        samples = group(*[disc(SIX[number % k]) for number in range(12)])
        assert colour_entropy_bit([samples]) == pytest.approx(math.log2(k), abs=0.02)


def test_many_colours_in_every_image_are_no_diversity_among_samples():
    rainbow = group(*[disc(*SIX)] * 8)
    pooled = hue_histogram(rainbow).mean(axis=0)
    assert (
        -(pooled[pooled > 0] * np.log2(pooled[pooled > 0])).sum() > 2.3
    )  # what a plain entropy would say
    assert colour_entropy_bit([rainbow]) == pytest.approx(0, abs=0.02)
    assert colour_entropy_bit([group(disc(0.0, 0.5), disc(0.5, 0.0))]) < 0.02


def test_the_mean_is_over_prompts_and_their_own_colours_do_not_mix():
    red, blue = group(*[disc(0.0)] * 4), group(*[disc(0.66)] * 4)
    both = group(disc(0.0), disc(0.66), disc(0.0), disc(0.66))
    assert colour_entropy_bit([red, blue]) == pytest.approx(0, abs=1e-9)
    assert colour_entropy_bit([red, both]) == pytest.approx(0.5, abs=0.01)
    assert colour_entropy_bit([both, red[:1]]) == pytest.approx(
        1, abs=0.02
    )  # one sample says nothing, and has no say
    assert math.isnan(colour_entropy_bit([red[:1]])) and math.isnan(colour_entropy_bit([]))


def test_a_hue_that_lies_between_two_bins_is_one_colour():
    edge = 1 / 24  # of the circle: half way between two of the twelve bins
    assert (
        colour_entropy_bit([group(disc(edge - 0.004), disc(edge + 0.004)).repeat(4, axis=0)]) < 0.05
    )
    assert hue_histogram(group(disc(0.5)))[0].argmax() == 6


def test_the_size_of_an_object_has_no_say_and_grey_is_a_colour_of_its_own():
    small, large = np.full((64, 64, 3), 240, np.uint8), disc(0.66)
    small[30:36, 30:36] = disc(0.0)[30:36, 30:36]
    assert colour_entropy_bit([group(small, large)]) == pytest.approx(1, abs=0.02)
    grey = disc(0.3, saturation=0.0)
    assert hue_histogram(group(grey, disc(0.3))).sum(axis=1) == pytest.approx([1, 1])
    assert colour_entropy_bit([group(grey, grey)]) == 0
    assert colour_entropy_bit([group(grey, disc(0.3))]) == pytest.approx(1)


@pytest.mark.parametrize(
    "text, named",
    [
        ("a Red circle", True),
        ("two blue-green stars", True),
        ("一只红色的熊猫", True),
        ("a circle left of a star", False),
        ("a bored cat on a white table", False),
        ("greenhouse", False),
        ("colourful flags", True),
        ("一只熊猫在雪地里", False),
    ],
)
def test_prompts_that_name_a_hue_are_known(text, named):
    assert names_a_colour(text) == named


def test_spreads_are_mean_pairwise_rms_distances():
    black, white = np.zeros((8, 8, 3), np.uint8), np.full((8, 8, 3), 255, np.uint8)
    assert pixel_spread(group(black, white)) == pytest.approx(1)
    assert pixel_spread(group(black, white, white)) == pytest.approx(2 / 3)
    assert pixel_spread(group(white, white)) == 0 and math.isnan(pixel_spread(white[None]))
    latents = torch.stack([torch.zeros(4, 6), torch.full((4, 6), 3.0), torch.full((4, 6), -1.0)])
    assert latent_spread(latents) == pytest.approx((3 + 1 + 4) / 3)
    assert latent_spread(latents.bfloat16()) == pytest.approx(8 / 3)
    assert math.isnan(latent_spread(latents[:1]))


def test_saturation_and_clipping_are_what_they_say():
    assert saturation(np.full((2, 40, 40, 3), 128, np.uint8)) == 0
    assert saturation(np.full((2, 40, 40, 3), (200, 100, 150), np.uint8)) == pytest.approx(
        0.5, abs=0.01
    )
    pixels = np.full((3, 4, 4, 3), 128, np.uint8)
    pixels[0, ..., 0], pixels[1, ..., 1], pixels[2, ..., 2] = 0, 255, 254
    assert clipped_share(pixels) == pytest.approx(2 / 9)


@pytest.mark.parametrize("height, width", [(64, 64), (512, 512), (33, 200), (1, 1), (20, 71)])
def test_thumbnails_are_means_at_every_size_and_their_own_thumbnails(height, width):
    pixels = np.random.default_rng(0).integers(0, 256, (3, height, width, 3), dtype=np.uint8)
    small = thumbnails(pixels)
    assert small.shape[0] == 3 and max(small.shape[1:3]) < 64
    assert np.array_equal(thumbnails(small), small)
    assert np.array_equal(thumbnails(torch.from_numpy(pixels)), small)
    factors = [max(1, side // 32) for side in (height, width)]
    first = pixels[1, : factors[0], : factors[1]].mean(axis=(0, 1))
    assert np.abs(small[1, 0, 0] - first).max() <= 0.51


def test_figures_hold_at_another_resolution():
    coarse, fine = (group(*[disc(hue, size=size) for hue in SIX]) for size in (64, 512))
    assert colour_entropy_bit([coarse]) == pytest.approx(colour_entropy_bit([fine]), abs=0.02)
    assert pixel_spread(coarse) == pytest.approx(pixel_spread(fine), rel=0.05)
    assert saturation(coarse) == pytest.approx(saturation(fine), rel=0.05)


@pytest.mark.parametrize(
    "pixels",
    [np.zeros((4, 4, 3), np.uint8), np.zeros((1, 4, 4, 3)), np.zeros((0, 4, 4, 3), np.uint8)],
)
def test_what_is_no_image_is_refused(pixels):
    with pytest.raises(ValueError, match="not uint8"):
        saturation(pixels)


def test_motion_is_the_change_from_frame_to_frame():
    levels = torch.tensor([0, 51, 102, 153], dtype=torch.uint8)[:, None, None, None].expand(
        4, 64, 48, 3
    )
    assert motion(levels) == pytest.approx(0.2)
    assert motion(levels[:1].expand(30, -1, -1, -1)) == 0.0
    assert math.isnan(motion(levels[:1]))
    late = torch.cat([levels[:1].expand(20, -1, -1, -1), levels])  # only the middle is looked at
    assert motion(late) == 0.0
