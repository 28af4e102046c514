from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from megadiff.data.prompts import load_prompts
from megadiff.rewards.base import RewardSample
from megadiff.rewards.ocr import (
    OcrReward,
    edit_distance,
    normalise,
    text_score,
    to_canvas,
    wanted_text,
)
from megadiff.types import Prompt

MakeSample = Callable[..., RewardSample]


@pytest.fixture(scope="module")
def reward() -> OcrReward:
    pytest.importorskip("rapidocr_onnxruntime")
    return OcrReward()


def rendered(*lines: str, size: tuple[int, int] = (512, 512), font_size: int = 52) -> np.ndarray:
    image = Image.new("RGB", size, (240, 232, 210))
    draw = ImageDraw.Draw(image)
    for i, line in enumerate(lines):
        place = (30, size[1] // 4 + i * 2 * font_size)
        draw.text(place, line, font=ImageFont.load_default(size=font_size), fill=(150, 20, 20))
    return np.asarray(image)


@pytest.mark.parametrize(
    ("lines", "prompt"),
    [
        (["OPEN"], 'a sign that reads "OPEN"'),
        (["Hello World"], "a card with “hello world”"),
        (["Soup of", "the Day"], 'a board with "Soup of the Day" on it'),
        (["STOP", "Room 42"], "two plates, 'Stop' above 'room 42'"),
    ],
)
def test_reads_rendered_text(
    reward: OcrReward, make_sample: MakeSample, lines: list[str], prompt: str
) -> None:
    assert reward.score([make_sample(rendered(*lines), prompt)]) == [1.0]


def test_wrong_text_scores_between(reward: OcrReward, make_sample: MakeSample) -> None:
    image = rendered("Hello World")
    near, far = reward.score([make_sample(image, '"Hello Ward"'), make_sample(image, '"zzz"')])
    assert 0.6 < near < 1.0 and far == 0.0


def test_field_text_goes_before_quotes(reward: OcrReward, make_sample: MakeSample) -> None:
    assert reward.score([make_sample(rendered("OPEN"), 'a "closed" sign', text="open")]) == [1.0]


def test_red_and_blue_are_not_swapped(
    make_sample: MakeSample, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    reward = OcrReward()
    reward._local.engine = lambda image: (seen.append(image), (None, None))[1]
    reward.score([make_sample(np.full((512, 512, 3), (1, 2, 3), np.uint8), '"x"')])
    assert seen[0][0, 0].tolist() == [3, 2, 1]


@pytest.mark.parametrize(
    "pixels",
    [
        np.zeros((1, 1, 3), np.uint8),
        np.zeros((64, 64, 3), np.uint8),
        np.full((512, 512, 3), 255, np.uint8),
        np.zeros((1, 3000, 3), np.uint8),
        np.full((4000, 2, 3), 200, np.uint8),
        np.zeros((5000, 4000, 3), np.uint8),
        np.random.default_rng(0).integers(0, 256, (256, 256, 3), dtype=np.uint8),
        np.random.default_rng(0).integers(0, 256, (2, 900, 3), dtype=np.uint8),
    ],
    ids=lambda pixels: "x".join(map(str, pixels.shape[:2])),
)
def test_images_without_text_score_zero_and_never_raise(
    reward: OcrReward, make_sample: MakeSample, pixels: np.ndarray
) -> None:
    assert reward.score([make_sample(pixels, 'a sign "welcome home"')])[0] <= 0.15


def test_huge_image_with_text_is_still_read(reward: OcrReward, make_sample: MakeSample) -> None:
    image = rendered("WELCOME", size=(3000, 2400), font_size=400)
    assert reward.score([make_sample(image, '"welcome"')]) == [1.0]


def test_video_is_the_mean_of_every_fourth_frame(
    reward: OcrReward, make_sample: MakeSample
) -> None:
    blank = rendered("")
    video = np.stack([rendered("OPEN"), blank, blank, blank, blank])
    assert reward.score([make_sample(video, '"open"')]) == [0.5]


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [
        ('a "b c" d', "b c"),
        ("a “b” and “c”", "bc"),
        ("the dog's 'bowl' isn't 'full up'", "bowlfull up"),
        ('a mug with "World\'s Best"', "World's Best"),
        ("it says 'don't stop'", "don't stop"),
        ("‘it’s’ done", "it’s"),
        ('unicode "日本 été"', "日本 été"),
        ("A '50s sign reading \"EAT\" and the customers' cars", "EAT"),
        ("rock 'n' roll with “LIVE”", "LIVE"),
        ("a 24” monitor that reads “Hello”", "Hello"),
        ('A 5" by 7" card that says "HELLO"', "HELLO"),
        ('a 24" monitor showing "ROOM 5" and "6"', "ROOM 56"),
        ("an empty \"\" beside 'one'", "one"),
    ],
)
def test_wanted_text(make_sample: MakeSample, prompt: str, wanted: str) -> None:
    assert wanted_text(make_sample(rendered(""), prompt).prompt) == wanted


@pytest.mark.parametrize("prompt", ["no quotes", 'empty ""', 'blank "  "', "the dog's bowl"])
def test_a_prompt_without_text_fails_at_start(make_sample: MakeSample, prompt: str) -> None:
    with pytest.raises(ValueError, match="ocr reward needs text") as caught:
        OcrReward().validate([make_sample(rendered(""), prompt).prompt])
    assert repr(prompt) in str(caught.value)


def test_a_text_field_that_is_no_string_fails_at_start(make_sample: MakeSample) -> None:
    with pytest.raises(ValueError, match="found 42"):
        OcrReward().validate([make_sample(rendered(""), 'a "b"', text=42).prompt])


@pytest.mark.parametrize(
    ("found", "wanted", "score"),
    [
        ("Hello  WORLD", "hello world", 1.0),
        ("", "abcd", 0.0),
        ("abcx", "abcd", 0.75),
        ("abcdxx", "abcd", 0.5),
        ("x" * 100, "abcd", 0.0),
        ("３．５０：", "3.50:", 1.0),
        ("你好世", "你好世界", 0.75),  # a character is one letter
        ("世 界", "世界", 1.0),
    ],
)
def test_text_score(found: str, wanted: str, score: float) -> None:
    assert text_score(found, wanted) == score


def test_extra_text_is_forgiven_on_request() -> None:
    assert text_score("xx abcd yy", "abcd", allow_extra_text=True) == 1.0


def test_edit_distance_is_a_metric() -> None:
    rng = random.Random(0)
    words = ["".join(rng.choices("abc", k=rng.randrange(0, 7))) for _ in range(40)]
    assert edit_distance("kitten", "sitting") == 3
    for a, b, c in zip(words, words[1:], words[2:], strict=False):
        assert edit_distance(a, b) == edit_distance(b, a)
        assert (edit_distance(a, b) == 0) == (a == b)
        assert edit_distance(a, c) <= edit_distance(a, b) + edit_distance(b, c)
        assert abs(len(a) - len(b)) <= edit_distance(a, b) <= max(len(a), len(b))


def test_canvas_keeps_ordinary_images_and_bounds_the_others() -> None:
    image = rendered("x")
    assert to_canvas(image) is image
    for height, width in [(1, 1), (1, 9000), (9000, 3), (4000, 4000)]:
        canvas = to_canvas(np.full((height, width, 3), 7, np.uint8))
        short, long = sorted(canvas.shape[:2])
        assert 64 <= short and long <= 1664 and long <= 4 * short and (canvas == 7).all()


PROMPTS = Path(__file__).parents[3] / "assets/prompts"


def test_shipped_prompts_have_text() -> None:
    prompts = load_prompts(PROMPTS / "ocr.jsonl", max_chars=2000)
    OcrReward().validate(prompts)
    assert len(prompts) >= 200


def test_held_out_prompts_share_no_text_and_no_quote_with_those_of_training() -> None:
    training = load_prompts(PROMPTS / "ocr.jsonl", max_chars=2000)
    training += load_prompts(PROMPTS / "video_text.jsonl", max_chars=2000)
    heldout = load_prompts(PROMPTS / "ocr_heldout.jsonl", max_chars=2000)

    def texts(prompts: list[Prompt]) -> set[str]:
        return {normalise(prompt.text) for prompt in prompts}

    def quotes(prompts: list[Prompt]) -> set[str]:
        return {normalise(wanted_text(prompt)) for prompt in prompts}

    def scenes(prompts: list[Prompt]) -> set[str]:
        return {prompt.text.split('"')[0] for prompt in prompts}

    assert not texts(training) & texts(heldout)
    assert not quotes(training) & quotes(heldout)
    assert not scenes(training) & scenes(heldout)
    # Nor is a quote said twice, so every prompt is a question of its own.
    assert len(quotes(heldout)) == len(heldout) == 64
    counts = Counter(prompt.fields["task"] for prompt in heldout)
    assert len(counts) == 3 and min(counts.values()) >= 15
