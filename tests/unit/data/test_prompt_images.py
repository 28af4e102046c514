"""Prompts that bring a video's first frame: what is read, and what is refused before a run
starts.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megadiff.data.pixels import read_first_frame
from megadiff.data.prompts import load_prompts, prompt_id

SIZE = (32, 64)


def picture(path: Path, *, height: int = 32, width: int = 64) -> Path:
    path.parent.mkdir(exist_ok=True)
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def prompts(folder: Path, *rows: dict) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_images_are_named_from_the_prompt_files_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("one.png", "zwei ü.png"):
        picture(tmp_path / "data" / name)
    rows = [{"prompt": "a", "image": "one.png", "n": 1}, {"prompt": "a", "image": "zwei ü.png"}]
    first, second = load_prompts(prompts(Path("data"), *rows), max_chars=9, first_frame_size=SIZE)
    assert (first.image, second.image) == ("data/one.png", "data/zwei ü.png") and first.fields == {
        "n": 1
    }
    assert first.id == prompt_id("a", " ", "one.png") != second.id != prompt_id("a", " ")


def test_pixels_are_those_of_the_file(tmp_path: Path) -> None:
    path = picture(tmp_path / "a.png")
    pixels = read_first_frame(path, height=32, width=64, where="here")
    assert pixels.dtype == np.uint8 and np.array_equal(pixels, np.asarray(Image.open(path)))


def test_without_a_first_frame_an_image_is_a_column(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        (prompt,) = load_prompts(
            prompts(tmp_path, {"prompt": "a", "image": "gone.png"}), max_chars=9
        )
    assert (
        prompt.image == ""
        and prompt.fields == {"image": "gone.png"}
        and prompt.id == prompt_id("a", " ")
    )
    assert "rollout.first_frame=true" in caplog.text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gone.png", ["gone.png", "cannot be read"]),
        ("folder", ["cannot be read"]),
        ("nul\0.png", ["cannot be read", "null byte"]),
        ("torn.png", ["torn.png", "no readable image"]),
        ("text.png", ["5 bytes that are no readable image"]),
        ("large.png", ["large.png has 64x40 pixels", "video's 64x32", "rollout.width"]),
        ("", ["'image' is ''", "rollout.first_frame=true"]),
        (None, ["'image' is None"]),
        ({"bytes": ""}, ["'image' is {'bytes': ''}"]),
    ],
)
def test_refusals_name_file_and_line(tmp_path: Path, name: object, words: list[str]) -> None:
    good = picture(tmp_path / "good.png")
    picture(tmp_path / "large.png", height=40)
    (tmp_path / "torn.png").write_bytes(good.read_bytes()[:-3000])
    (tmp_path / "text.png").write_text("hello")
    (tmp_path / "folder").mkdir()
    path = prompts(tmp_path, {"prompt": "a", "image": "good.png"}, {"prompt": "b", "image": name})
    with pytest.raises(ValueError) as caught:
        load_prompts(path, max_chars=9, first_frame_size=SIZE)
    for word in ("prompts.jsonl:2", *words):
        assert word in str(caught.value)


def test_a_text_file_has_no_images(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("a\n")
    with pytest.raises(ValueError, match=r"p.txt:1: 'image' is None"):
        load_prompts(tmp_path / "p.txt", max_chars=9, first_frame_size=SIZE)
