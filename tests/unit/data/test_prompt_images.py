"""Prompts that bring images: what is read, and what is refused before a run starts."""

from __future__ import annotations

import json
import logging
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megadiff.data.pixels import read_image
from megadiff.data.prompts import digest_of, load_prompts, prompt_id


def readable(files: tuple[str, ...]) -> None:
    for file in files:
        read_image(file)


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
    both = ["zwei ü.png", "one.png"]
    rows = [{"prompt": "a", "image": "one.png", "n": 1}, {"prompt": "a", "images": both}]
    rows += [{"prompt": "a", "image": None, "images": ["one.png"]}]
    path = prompts(Path("data"), *rows)
    first, second, third = load_prompts(path, max_chars=9, check_images=readable)
    assert (first.images, first.fields) == (("data/one.png",), {"n": 1})
    assert second.images == ("data/zwei ü.png", "data/one.png")
    assert first.id == prompt_id("a", " ", ["one.png"]) == third.id
    assert second.id == prompt_id("a", " ", both) != prompt_id("a", " ", both[::-1])
    # ids are the noise: they stay what they were when rows had one image alone
    assert prompt_id("a", " ", ["one.png"]) == digest_of('["a", " ", "one.png"]', size=8)

    # a file elsewhere, by a path from this folder or a whole one
    far = picture(tmp_path / "far.png")
    rows = [{"prompt": "a", "image": "../far.png"}, {"prompt": "a", "image": str(far)}]
    upwards, absolute = load_prompts(
        prompts(Path("data"), *rows), max_chars=9, check_images=readable
    )
    assert (upwards.images, absolute.images) == (("data/../far.png",), (str(far),))


def test_pixels_are_those_of_the_file(tmp_path: Path) -> None:
    path = picture(tmp_path / "a.png")
    pixels = read_image(path)
    assert pixels.dtype == np.uint8 and np.array_equal(pixels, np.asarray(Image.open(path)))


def test_where_the_model_is_given_none_images_are_columns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        (prompt,) = load_prompts(
            prompts(tmp_path, {"prompt": "a", "image": "gone.png"}), max_chars=9
        )
    assert (
        prompt.images == ()
        and prompt.fields == {"image": "gone.png"}
        and prompt.id == prompt_id("a", " ")
    )
    assert "rollout.images=true" in caplog.text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gone.png", ["gone.png", "cannot be read"]),
        ("folder", ["cannot be read", "folder is no file"]),
        ("pipe.png", ["cannot be read", "pipe.png is no file"]),
        ("nul\0.png", ["cannot be read", "null byte"]),
        ("torn.png", ["torn.png", "no readable image"]),
        ("text.png", ["5 bytes that are no readable image"]),
        ("empty.png", ["empty.png: 0 bytes that are no readable image"]),
        ("bomb.png", ["bomb.png", "no readable image", "exceeds limit"]),
        ("large.png", ["large.png", "no readable image", "(400000000 pixels) exceeds limit"]),
        ("float.tif", ["float.tif", "samples of 32 bits"]),
        ("", ["images are {'image': ''}", "rollout.images=true"]),
        (None, ["images are {}"]),
        ({"bytes": ""}, ["images are {'image': {'bytes': ''}}"]),
        ([], ["images are {'image': []}"]),
        (["good.png", 3], ["images are {'image': ['good.png', 3]}"]),
    ],
)
def test_refusals_name_file_and_line(tmp_path: Path, name: object, words: list[str]) -> None:
    good = picture(tmp_path / "good.png")
    (tmp_path / "empty.png").touch()
    (tmp_path / "bomb.png").write_bytes(bomb(100_000))
    (tmp_path / "large.png").write_bytes(bomb(20_000))
    os.mkfifo(tmp_path / "pipe.png")
    Image.new("F", (8, 8)).save(tmp_path / "float.tif")
    (tmp_path / "torn.png").write_bytes(good.read_bytes()[:-3000])
    (tmp_path / "text.png").write_text("hello")
    (tmp_path / "folder").mkdir()
    path = prompts(tmp_path, {"prompt": "a", "image": "good.png"}, {"prompt": "b", "image": name})
    with pytest.raises(ValueError) as caught:
        load_prompts(path, max_chars=9, check_images=readable)
    for word in ("prompts.jsonl:2", *words):
        assert word in str(caught.value)


def test_a_row_has_one_of_the_two_columns(tmp_path: Path) -> None:
    picture(tmp_path / "good.png")
    row = {"prompt": "a", "image": "good.png", "images": ["good.png"]}
    with pytest.raises(ValueError, match=r":1: its images are {'image': 'good.png', 'images'"):
        load_prompts(prompts(tmp_path, row), max_chars=9, check_images=readable)
    pixels = {"prompt": "a", "image": {"bytes": "0" * 2_000_000}}
    with pytest.raises(ValueError, match=r"its images are {'image': {'bytes': '000") as caught:
        load_prompts(prompts(tmp_path, pixels), max_chars=9, check_images=readable)
    message = str(caught.value).replace(str(tmp_path), "")
    assert len(message) < 600 and "write pixels or bytes to files, and name those" in message
    (tmp_path / "p.txt").write_text("a\n")
    with pytest.raises(ValueError, match=r"p.txt:1: its images are {}"):
        load_prompts(tmp_path / "p.txt", max_chars=9, check_images=readable)


def bomb(side: int) -> bytes:
    """Return a PNG of few bytes whose header says that it is side × side pixels."""
    chunks = [b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0), b"IDAT"]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
        for chunk in chunks
    )
