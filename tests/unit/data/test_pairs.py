"""Stores of preference pairs: two images a row, and refusals that name the row."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from megadiff.data.images import open_images
from megadiff.data.stores import PAIRS

CAPTIONS = ["a red dot", "一面蓝色的墙"]


def encoded(number: int) -> bytes:
    """Return the PNG of an image whose size differs from number to number."""
    file = io.BytesIO()
    Image.fromarray(picture(number)).save(file, "PNG")
    return file.getvalue()


def picture(number: int) -> np.ndarray:
    shape = (20 + 8 * number, 30, 3)
    return np.random.default_rng(number).integers(0, 256, shape, dtype=np.uint8)


def write_folder(folder: Path) -> Path:
    folder.mkdir()
    for number in range(4):
        (folder / f"{number}.png").write_bytes(encoded(number))
    rows = [
        {"caption": CAPTIONS[0], "chosen": "0.png", "rejected": "1.png"},
        {"text": CAPTIONS[1], "chosen_file_name": "2.png", "rejected_file_name": "3.png"},
    ]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def write_parquet(path: Path) -> Path:
    columns = {
        "caption": CAPTIONS,
        "chosen": [{"bytes": encoded(number), "path": None} for number in (0, 2)],
        "rejected": [encoded(number) for number in (1, 3)],
    }
    parquet.write_table(pyarrow.table(columns), path, row_group_size=1)
    return path


WRITERS = {
    "folder": lambda at: write_folder(at / "pairs"),
    "parquet": lambda at: write_parquet(at / "pairs.parquet"),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_chosen_and_rejected_follow_each_other(tmp_path: Path, kind: str) -> None:
    source = open_images(str(WRITERS[kind](tmp_path)), seed=0, kind=PAIRS)
    assert (len(source), source.num_items, source.images_per_item) == (4, 2, 2)
    assert list(source.captions) == [CAPTIONS[0], CAPTIONS[0], CAPTIONS[1], CAPTIONS[1]]
    for row in range(4):
        np.testing.assert_array_equal(source.pixels(row), picture(row))


def test_the_rows_of_the_docs(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs/preference_pairs.md").read_text()
    (rows,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    (tmp_path / "metadata.jsonl").write_text(rows)
    for number, name in enumerate(re.findall(r'"([ab]/\d\.png)"', rows)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(encoded(number))
    source = open_images(str(tmp_path), seed=0, kind=PAIRS)
    assert (source.num_items, source.captions[3]) == (2, "two blue squares")
    np.testing.assert_array_equal(source.pixels(3), picture(3))


def test_images_of_unlike_sizes_are_cut_to_one(tmp_path: Path) -> None:
    source = open_images(str(write_folder(tmp_path / "pairs")), seed=0, kind=PAIRS)
    (block,) = source.blocks(0, 4, size=8, height=16, width=16)
    assert block.pixels_BHWC.shape == (4, 16, 16, 3)


REFUSALS = {
    '{"caption": "a", "rejected": "0.png"}': (
        r"jsonl:2: no chosen among the keys .*; name it chosen_file_name or chosen"
    ),
    '{"caption": "a", "chosen": "0.png"}': r"jsonl:2: no rejected among the keys",
    '{"chosen": "0.png", "rejected": "1.png"}': "jsonl:2: no caption among the keys",
    '{"caption": "a", "chosen": "0.png", "rejected": "9.png"}': "jsonl:2: .*9.png does not exist",
    '{"caption": "a", "chosen": "0.png", "rejected": null}': "jsonl:2: the image is None",
    '{"caption": "a", "chosen": "0.png", "rejected": "0.png"}': (
        "jsonl:2: .*0.png is both chosen and rejected; name two images"
    ),
}


@pytest.mark.parametrize("line", REFUSALS)
def test_refusals_name_the_line(tmp_path: Path, line: str) -> None:
    folder = write_folder(tmp_path / "pairs")
    whole = (folder / "metadata.jsonl").read_text().splitlines()[0]
    (folder / "metadata.jsonl").write_text(f"{whole}\n{line}\n")
    with pytest.raises(ValueError, match=REFUSALS[line]):
        open_images(str(folder), seed=0, kind=PAIRS)


def test_refusals_of_a_parquet(tmp_path: Path) -> None:
    path = tmp_path / "pairs.parquet"
    columns = {"caption": ["a"], "chosen": [encoded(0)]}
    parquet.write_table(pyarrow.table(columns), path)
    with pytest.raises(ValueError, match="no column 'rejected' among"):
        open_images(str(path), seed=0, kind=PAIRS)

    columns = {"caption": ["a", "b"], "chosen": [encoded(0)] * 2, "rejected": [encoded(1), None]}
    parquet.write_table(pyarrow.table(columns), path)
    source = open_images(str(path), seed=0, kind=PAIRS)
    with pytest.raises(ValueError, match="pairs.parquet: row 2: 'rejected' holds no bytes"):
        source.pixels(3)
    path.write_text("no parquet")
    with pytest.raises(ValueError, match="data.pairs=.*not a parquet file"):
        open_images(str(path), seed=0, kind=PAIRS)


def test_what_holds_no_pairs(tmp_path: Path) -> None:
    (tmp_path / "a.tar").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "none").mkdir()
    (tmp_path / "none/metadata.jsonl").touch()
    for name, words in {
        "a.tar": "unknown suffix '.tar'; known: .parquet, or a folder",
        "empty": "holds none of them; need metadata.jsonl, or files of one kind of .parquet",
        "none": "holds 0 captioned pairs, need at least 1",
        "my_pairs:Pairs": "no such file or folder; give a folder with metadata.jsonl, or a .parq",
    }.items():
        with pytest.raises(ValueError, match=f"data.pairs=.*{name}: {words}"):
            open_images(str(tmp_path / name), seed=0, kind=PAIRS)
