"""Readers of captioned images: what each format gives, and that every refusal names its place."""

from __future__ import annotations

import io
import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from megadiff.data.images import open_images
from megadiff.data.pixels import decode, fit, is_enlarged

CAPTIONS = ["a red dot", "red 红色的圆 🟥", "é"]


def encoded(image: Image.Image | np.ndarray, format: str = "PNG", **options: object) -> bytes:
    if isinstance(image, np.ndarray):
        image = Image.fromarray(image)
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def picture(number: int, height: int = 20, width: int = 30) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)


def write_folder(folder: Path) -> Path:
    (folder / "sub").mkdir(parents=True)
    names = ["0.png", "sub/1.png", "2.png"]
    for number, name in enumerate(names):
        (folder / name).write_bytes(encoded(picture(number)))
    keys = [("file_name", "caption"), ("image", "text"), ("file_name", "prompt")]
    rows = [
        {image: name, text: caption}
        for (image, text), name, caption in zip(keys, names, CAPTIONS, strict=True)
    ]
    (folder / "metadata.jsonl").write_text(
        "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    )
    return folder


def write_parquet(path: Path, numbers: list[int] | None = None, *, struct: bool = True) -> Path:
    numbers = numbers or [0, 1, 2]
    images = [encoded(picture(number)) for number in numbers]
    column = [{"bytes": image, "path": None} for image in images] if struct else images
    table = pyarrow.table({"image": column, "text": [CAPTIONS[number] for number in numbers]})
    parquet.write_table(table, path, row_group_size=2)
    return path


def write_tar(path: Path, members: dict[str, bytes] | None = None) -> Path:
    if members is None:
        members = {
            "a/0.png": encoded(picture(0)),
            "a/0.txt": f"{CAPTIONS[0]}\n".encode(),
            "a/0.json": b'{"width": 3}',
            "1.PNG": encoded(picture(1)),
            "1.json": json.dumps({"caption": CAPTIONS[1]}).encode(),
            "ignored.cls": b"7",
            "2.txt": CAPTIONS[2].encode(),
            "2.png": encoded(picture(2)),
        }
    with tarfile.open(path, "w") as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def write_folder_of(folder: Path, suffix: str) -> Path:
    folder.mkdir()
    (folder / "README.md").write_text("not data")
    if suffix == "parquet":
        write_parquet(folder / "part-1.parquet", [2], struct=False)
        write_parquet(folder / "part-0.parquet", [0, 1])
    else:
        write_tar(folder / "1.tar", {"2.png": encoded(picture(2)), "2.txt": CAPTIONS[2].encode()})
        pair = {
            f"{n}.{end}": encoded(picture(n)) if end == "png" else CAPTIONS[n].encode()
            for n in (0, 1)
            for end in ("png", "txt")
        }
        write_tar(folder / "0.tar", pair)
    return folder


WRITERS = {
    "folder": lambda at: write_folder(at / "images"),
    "parquet": lambda at: write_parquet(at / "images.parquet"),
    "parquet of plain bytes": lambda at: write_parquet(at / "images.parquet", struct=False),
    "tar": lambda at: write_tar(at / "images.tar"),
    "parquets": lambda at: write_folder_of(at / "images", "parquet"),
    "tars": lambda at: write_folder_of(at / "images", "tar"),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_every_format_gives_the_same_images_and_captions(tmp_path: Path, kind: str) -> None:
    path = WRITERS[kind](tmp_path)
    source = open_images(str(path), seed=0)
    assert (len(source), list(source.captions), source.name) == (3, CAPTIONS, str(path))
    for row in (2, 0, 1):
        np.testing.assert_array_equal(source.pixels(row), picture(row))
    blocks = list(source.blocks(1, 3, size=8, height=20, width=30))
    assert [list(block.captions) for block in blocks] == [CAPTIONS[1:]]
    np.testing.assert_array_equal(blocks[0].pixels_BHWC, np.stack([picture(1), picture(2)]))
    sizes = [len(block.captions) for block in source.blocks(0, 3, size=2, height=16, width=16)]
    assert sizes == [2, 1]
    with pytest.raises(IndexError):
        source.pixels(3)


@pytest.mark.parametrize("kind", WRITERS)
def test_fingerprint_changes_with_the_data(tmp_path: Path, kind: str) -> None:
    path = WRITERS[kind](tmp_path)
    before = open_images(str(path), seed=0).fingerprint
    assert open_images(str(path), seed=1).fingerprint == before
    some_file = (
        next(file for file in sorted(path.rglob("*")) if file.suffix not in (".md", ".jsonl"))
        if path.is_dir()
        else path
    )
    os.utime(some_file, ns=(0, 0))
    assert open_images(str(path), seed=0).fingerprint != before


def test_fingerprint_changes_with_a_caption(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "images")
    before = open_images(str(folder), seed=0).fingerprint
    metadata = folder / "metadata.jsonl"
    metadata.write_text(metadata.read_text().replace("red dot", "RED dot"))
    assert open_images(str(folder), seed=0).fingerprint != before


METADATA_REFUSALS = {
    '{"caption": "a"}': "jsonl:2: no image among the keys .'caption'.; name it file_name or image",
    '{"image": "0.png"}': "jsonl:2: no caption among .*'image'.*caption or text or prompt",
    '{"image": "0.png", "text": null}': "jsonl:2: the caption is None",
    '{"image": "0.png", "text": " "}': "jsonl:2: the caption is ' '",
    '{"image": "9.png", "text": "a"}': "jsonl:2: .*9.png does not exist",
    '{"image": "sub", "text": "a"}': "jsonl:2: .*sub does not exist",
    '{"image": 3, "text": "a"}': "jsonl:2: the image is 3",
    '{"image": "../images.tar", "text": "a"}': r"jsonl:2: '\.\./images.tar' leaves",
    '{"image": "sub/../../x", "text": "a"}': r"jsonl:2: 'sub/\.\./\.\./x' leaves",
    '{"image": "/etc/passwd", "text": "a"}': "jsonl:2: '/etc/passwd' leaves",
    "{": "jsonl:2: not valid JSON",
    "[]": "jsonl:2: a list",
}


@pytest.mark.parametrize("line", METADATA_REFUSALS)
def test_metadata_refusals_name_the_line(tmp_path: Path, line: str) -> None:
    folder = write_folder(tmp_path / "images")
    (folder / "metadata.jsonl").write_text(f'{{"image": "0.png", "text": "a"}}\n{line}\n')
    with pytest.raises(ValueError, match=METADATA_REFUSALS[line]):
        open_images(str(folder), seed=0)


def test_a_name_with_dots_inside_the_folder_is_fine(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "images")
    (folder / "..0.png").write_bytes(encoded(picture(0)))
    rows = [{"image": name, "text": "a"} for name in ("sub/../0.png", "..0.png")]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert len(open_images(str(folder), seed=0)) == 2


PNG = encoded(picture(0))
TAR_REFUSALS = {
    "no caption": ({"a.png": PNG, "b.txt": b"b"}, "sample 'a' has no a.txt|json"),
    "no image": ({"a/b.txt": b"b"}, "sample 'a/b' has no a/b.jpg|jpeg|png|webp"),
    "two images": (
        {"a.png": PNG, "a.jpg": PNG, "a.txt": b"a"},
        "a.jpg and a.png are of one sample",
    ),
    "twice": ({"a.png": PNG, "a.txt": b"a", "a.TXT": b"b"}, "a.TXT and a.txt are of one sample"),
    "empty caption": ({"a.png": PNG, "a.txt": b"\n"}, "a.txt: the caption is ''"),
    "not UTF-8": ({"a.png": PNG, "a.txt": b"\xff\xfe"}, "a.txt: .*0xff"),
    "bad JSON": ({"a.png": PNG, "a.json": b"{"}, "a.json: not valid JSON"),
    "deep JSON": ({"a.png": PNG, "a.json": b"[" * 100_000}, "a.json: not valid JSON .*too deep"),
    "long number": (
        {"a.png": PNG, "a.json": b'{"x": ' + b"9" * 5000 + b"}"},
        "a.json: not valid JSON .*4300",
    ),
    "no object": ({"a.png": PNG, "a.json": b"[1]"}, "a.json: a list"),
    "no caption in JSON": (
        {"a.png": PNG, "a.json": b'{"w": 1}'},
        "a.json: no caption among the keys .'w'.",
    ),
    "nothing": ({}, "holds 0 captioned images"),
}


@pytest.mark.parametrize("case", TAR_REFUSALS)
def test_tar_refusals_name_the_member(tmp_path: Path, case: str) -> None:
    members, message = TAR_REFUSALS[case]
    path = write_tar(tmp_path / "images.tar", members)
    with pytest.raises(ValueError, match=message.replace("|", r"\|")) as caught:
        open_images(str(path), seed=0)
    assert "images.tar" in str(caught.value)


def test_a_tar_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "images.tar")
    data = path.read_bytes()
    end = len(data.rstrip(b"\0"))
    for size in [0, 100, 512, 700, *range(1024, end + 512, 512), end - 100]:
        path.write_bytes(data[:size])
        with pytest.raises(ValueError, match="images.tar.*fetch it again"):
            open_images(str(path), seed=0)
    second = data.index(b"a/0.txt")
    path.write_bytes(data[:second] + b"\xff" * 512 + data[second + 512 :])
    with pytest.raises(ValueError, match="no end mark at byte"):
        open_images(str(path), seed=0)
    path.write_bytes(data + data)
    with pytest.raises(ValueError, match=rf"its end mark at byte \d+ of {2 * len(data)}, but more"):
        open_images(str(path), seed=0)
    path.write_bytes(data + bytes(3 * 2**20 + 512))
    assert len(open_images(str(path), seed=0)) == 3


def test_names_in_a_tar(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One folder written in two ways, and images that belong to no caption."""
    caption = CAPTIONS[0].encode()
    members = {"a/1.png": PNG, "./a/1.txt": caption, "2.seg.png": PNG, "3.v1.PNG": PNG}
    images = open_images(str(write_tar(tmp_path / "images.tar", members)), seed=0)
    assert list(images.captions) == [CAPTIONS[0]]
    assert "images.tar: 2 images are left out, as 2.seg.png: a sample's name ends" in caplog.text


def test_parquet_refusals(tmp_path: Path) -> None:
    def opened(**columns: list) -> object:
        parquet.write_table(pyarrow.table(columns), tmp_path / "i.parquet")
        return open_images(str(tmp_path / "i.parquet"), seed=0)

    with pytest.raises(ValueError, match="i.parquet: no column 'image' among .'jpg', 'text'."):
        opened(jpg=[b""], text=["a"])
    with pytest.raises(ValueError, match="i.parquet: no caption among the keys .'image'."):
        opened(image=[b""])
    with pytest.raises(ValueError, match="i.parquet: row 2: the caption is None"):
        opened(image=[PNG, PNG], text=["a", None])
    with pytest.raises(ValueError, match="holds 0 captioned images"):
        opened(image=[], text=[])
    for image in (
        [PNG, None],
        [{"bytes": PNG, "path": None}, {"bytes": None, "path": "x.png"}],
        ["x", "y"],
    ):
        with pytest.raises(ValueError, match="i.parquet: row 2: 'image' holds no bytes"):
            opened(image=image, text=["a", "b"]).pixels(1)
    (tmp_path / "i.parquet").write_text("no parquet")
    with pytest.raises(ValueError, match="data.images=.*i.parquet: not a parquet file"):
        open_images(str(tmp_path / "i.parquet"), seed=0)


def test_a_damaged_parquet_is_named(tmp_path: Path) -> None:
    data = bytearray(write_parquet(tmp_path / "i.parquet").read_bytes())
    data[4:34] = bytes(30)  # the first page's header, after the file's magic number
    (tmp_path / "i.parquet").write_bytes(data)
    with pytest.raises(ValueError, match="i.parquet is damaged"):
        open_images(str(tmp_path / "i.parquet"), seed=0).pixels(0)
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    data[footer : footer + 10] = b"\xff" * 10
    (tmp_path / "i.parquet").write_bytes(data)
    with pytest.raises(ValueError, match="i.parquet: not a parquet file"):
        open_images(str(tmp_path / "i.parquet"), seed=0)


def test_sources_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "a.zip").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "both").mkdir()
    for name in ("a.tar", "b.parquet"):
        (tmp_path / "both" / name).touch()
    for name, message in {
        "nope": "no such file or folder",
        "a.zip": "unknown suffix '.zip'; known: .parquet, .tar",
        "empty": "holds none of them; need metadata.jsonl",
        "both": "holds .parquet and .tar; need",
    }.items():
        with pytest.raises(ValueError, match=f"data.images=.*{name}: {message}"):
            open_images(str(tmp_path / name), seed=0)


@pytest.mark.parametrize("kind", ["folder", "tar", "parquet"])
def test_a_damaged_image_is_named(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = len(encoded(picture(1))) // 2
    whole = encoded
    monkeypatch.setitem(
        globals(),
        "encoded",
        lambda image: whole(image)[
            : cut if image is not None and np.array_equal(image, picture(1)) else None
        ],
    )
    source = open_images(str(WRITERS[kind](tmp_path)), seed=0)
    name = {
        "folder": r"metadata.jsonl:2 \(1.png\)",
        "tar": "images.tar: 1.PNG",
        "parquet": "images.parquet: row 2",
    }[kind]
    with pytest.raises(ValueError, match=f"{name}: {cut} bytes that are no readable image"):
        list(source.blocks(0, 3, size=1, height=16, width=16))


def _corner(data: bytes) -> list[int]:
    pixels = decode(data, where="x")
    assert pixels.dtype == np.uint8 and pixels.shape[2] == 3
    return pixels[0, 0].tolist()


def test_every_kind_of_image_becomes_rgb() -> None:
    size = (4, 2)
    half = Image.new("RGBA", size, (255, 0, 0, 128))
    assert _corner(encoded(half)) == pytest.approx([255, 127, 127], abs=1)
    assert _corner(encoded(Image.new("RGBA", size, (9, 9, 9, 0)))) == [255, 255, 255]
    assert _corner(encoded(Image.new("LA", size, (0, 0)))) == [255, 255, 255]
    assert _corner(encoded(Image.new("L", size, 77))) == [77, 77, 77]
    assert _corner(encoded(Image.new("1", size, 1))) == [255, 255, 255]
    assert _corner(encoded(np.full((2, 4), 0x8080, np.uint16))) == [128, 128, 128]
    assert _corner(encoded(np.full((2, 4), 300, np.uint16), "TIFF")) == [1, 1, 1]
    assert _corner(encoded(Image.new("CMYK", size, (0, 255, 255, 0)), "JPEG"))[0] > 200
    palette = Image.new("RGB", size, (10, 200, 30)).quantize(4)
    assert _corner(encoded(palette)) == [10, 200, 30]
    assert _corner(encoded(palette, transparency=palette.getpixel((0, 0)))) == [255, 255, 255]
    assert _corner(encoded(Image.new("RGB", size, (1, 2, 3)), "WEBP", lossless=True)) == [1, 2, 3]
    red, blue = (Image.new("RGB", size, colour) for colour in ("red", "blue"))
    for format in ("GIF", "PNG"):  # an animation is its first frame
        animated = encoded(red, format, save_all=True, append_images=[blue])
        assert _corner(animated) == [255, 0, 0]
    for mode in ("I", "F"):
        with pytest.raises(ValueError, match=f"x: .*mode {mode}"):
            decode(encoded(Image.new(mode, size), "TIFF"), where="x")


def test_exif_rotation_is_applied() -> None:
    image = Image.fromarray(picture(0, 8, 12))
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: show it rotated by 90° clockwise
    np.testing.assert_array_equal(
        decode(encoded(image, exif=exif), where="x"), np.rot90(picture(0, 8, 12), -1)
    )


def test_fit_takes_the_largest_centred_part() -> None:
    pixels = np.zeros((40, 100, 3), np.uint8)
    pixels[:, 30:70] = 200
    assert fit(pixels, 20, 20).min() > 180  # the filter reaches over the border
    assert np.abs(fit(pixels, 20, 20)[:, 3:-3].astype(int) - 200).max() <= 1
    np.testing.assert_array_equal(
        fit(pixels.transpose(1, 0, 2), 20, 20), fit(pixels, 20, 20).transpose(1, 0, 2)
    )
    assert fit(pixels, 40, 100) is pixels
    for height, width in [(16, 16), (64, 32), (480, 16), (1, 1), (41, 99)]:
        assert fit(pixels, height, width).shape == (height, width, 3)


def test_fit_keeps_the_mean_of_fine_detail() -> None:
    stripes = np.zeros((256, 256, 3), np.uint8)
    stripes[:, ::2] = 255
    assert np.abs(fit(stripes, 32, 32).astype(int) - 127).max() <= 6


def test_enlarged_by_more_than_twice() -> None:
    assert not is_enlarged(picture(0, 20, 30), 40, 40)
    assert is_enlarged(picture(0, 20, 30), 41, 16)
    assert not is_enlarged(picture(0, 20, 30), 16, 60)
