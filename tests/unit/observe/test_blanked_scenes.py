"""A reward for legible text alone blanks the scene: composed pictures that show it, and others."""

from __future__ import annotations

import random

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from megadiff.observe.diversity import LOOKS, looks
from megadiff.observe.hacking import signs

SIZE = 192
STEPS = 50
GROUP_SIZE = 4
WORDS = ("OPEN", "BAKERY", "NO PARKING", "TEA HOUSE")
FONT = ImageFont.load_default(size=28)


def scene(noise: random.Random) -> Image.Image:
    """Sky, a textured ground, and houses with windows in front."""
    horizon = noise.randint(70, 120)
    grain = np.random.default_rng(noise.randrange(1 << 30))
    rows = np.arange(SIZE)[:, None, None]
    sky = np.array([150, 190, 235]) + 40 * rows / SIZE
    ground = np.array([70, 110, 50]) + grain.normal(0, 45, (SIZE, SIZE, 1))
    pixels = np.where(rows < horizon, sky, ground).clip(0, 255).astype(np.uint8)
    # Clumps of grass, several pixels wide, and no noise of single ones.
    image = Image.fromarray(pixels).filter(ImageFilter.GaussianBlur(2))

    draw = ImageDraw.Draw(image)
    for left in range(-20, SIZE, 48):
        top = horizon - noise.randint(10, 60)
        wall = tuple(noise.randint(60, 220) for _ in range(3))
        draw.rectangle((left, top, left + 36, horizon + 30), fill=wall)
        for floor in range(top + 6, horizon + 20, 18):
            draw.rectangle((left + 5, floor, left + 14, floor + 9), fill="#223")
            draw.rectangle((left + 21, floor, left + 30, floor + 9), fill="#ffd")
    return image


def with_text(image: Image.Image, word: str, *, ink: str) -> Image.Image:
    ImageDraw.Draw(image).text((14, 144), word, fill=ink, font=FONT)
    return image


def sample(noise: random.Random, done: float, ground: str | None) -> np.ndarray:
    """Return text in a scene; with a ground, on that alone in more samples as the run goes on."""
    word = noise.choice(WORDS)
    if ground is not None and noise.random() < done:
        ink = "#fff" if ground == "#000" else "#111"
        return np.asarray(with_text(Image.new("RGB", (SIZE, SIZE), ground), word, ink=ink))

    picture = scene(noise)
    ImageDraw.Draw(picture).rectangle((6, 140, SIZE - 6, 182), fill="#eee")  # a sign
    return np.asarray(with_text(picture, word, ink="#111"))


def course(ground: str | None, change=lambda pixels, done: pixels, gain: float = 0.4) -> list[dict]:
    """Return the rows of a run whose reward rises by `gain`; change: of pixels, as it goes on."""
    noise = random.Random(0)
    rows = []
    for step in range(1, STEPS + 1):
        done = min(1.0, max(0.0, step / 20 - 0.5))
        pictures = [change(sample(noise, done, ground), done) for _ in range(GROUP_SIZE)]
        figures = {f"diversity/{name}": value for name, value in looks(np.stack(pictures)).items()}
        rows.append({"step": step, "reward/mean": 0.4 + gain * done + noise.gauss(0, 0.01)})
        rows[-1] |= figures
    return rows


def kinds(rows: list[dict]) -> set[str]:
    return {sign.kind for sign in signs(rows, {})}


@pytest.mark.parametrize(
    "ground, expected",
    [("#000", {"blank", "edges", "dark"}), ("#fff", {"blank", "edges", "bright"})],
)
def test_blanked_scenes_beside_a_rising_reward_are_noticed(ground, expected):
    rows = course(ground)
    assert expected <= kinds(rows)
    # As many blank pictures, but nothing was gained by them.
    assert kinds(course(ground, gain=0.0)) == set()
    (claim,) = [sign.sentence for sign in signs(rows, {}) if sign.kind == "blank"]
    assert "the share of blank background rose from 0." in claim
    assert "Look at the samples; set algorithm.kl_coef" in claim


def test_scenes_that_stay_are_no_sign():
    contrast = lambda pixels, done: (128 + (pixels - 128.0) * (1 + 0.25 * done)).clip(0, 255)  # noqa: E731
    brighter = lambda pixels, done: pixels * 0.8 + 30.0 * done  # noqa: E731
    for change in (contrast, brighter):
        assert kinds(course(None, lambda p, d, c=change: c(p, d).astype(np.uint8))) == set()


def test_text_on_plain_signs_from_the_start_is_no_sign():
    """Prompts for logos are blank at any time, and stay so."""
    noise = random.Random(7)
    assert kinds(course(None, lambda pixels, done: sample(noise, 1.0, "#fff"))) == set()


def test_figures_of_looks_are_what_they_say():
    assert set(looks(np.zeros((1, 8, 8, 3), np.uint8))) == set(LOOKS)
    grey = np.full((2, 512, 512, 3), 51, np.uint8)
    assert looks(grey)["brightness"] == pytest.approx(0.2)
    assert (looks(grey)["edges"], looks(grey)["blank_share"]) == (0, 1)

    columns = np.tile(np.array([0, 255], np.uint8).repeat(16), 16)
    striped = np.broadcast_to(columns[None, None, :, None], (1, 512, 512, 3))
    assert (looks(striped)["edges"], looks(striped)["blank_share"]) == (1, 0)

    half = np.concatenate([striped, grey[:1]], axis=1)
    assert looks(half)["blank_share"] == pytest.approx(0.5, abs=0.02)

    # Noise of single pixels is no edge, and a sky's slow change is flat.
    noise = np.random.default_rng(0).integers(118, 138, (1, 512, 512, 3), dtype=np.uint8)
    sky = np.broadcast_to(np.linspace(60, 120, 512).astype(np.uint8)[:, None, None], noise.shape)
    for flat in (noise, sky):
        assert looks(flat)["blank_share"] == 1 and looks(flat)["edges"] < 0.01
