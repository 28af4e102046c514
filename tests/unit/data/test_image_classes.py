"""A class's images are the same wherever reading starts, and a wrong class is refused by name."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from examples.shapes.images import CHUNK
from examples.shapes.world import make_chunk
from megadiff.data.images import open_images

SHAPES = "examples.shapes.images:ShapesImages"
CAPTIONS_OF_SEED_7 = ["three green squares", "three purple circles"]
MEANS_OF_SEED_7 = [202.32, 180.13]


def test_generated_images_do_not_depend_on_where_reading_starts() -> None:
    source = open_images(f"{SHAPES}:{CHUNK + 20}:7", seed=0)
    (whole,) = source.blocks(CHUNK - 10, CHUNK, size=100, height=64, width=64)
    parts = list(source.blocks(CHUNK - 10, CHUNK + 5, size=8, height=64, width=64))
    assert [len(part.captions) for part in parts] == [8, 2, 5]
    np.testing.assert_array_equal(
        np.concatenate([part.pixels_BHWC for part in parts])[:10], whole.pixels_BHWC
    )
    assert [caption for part in parts for caption in part.captions][:10] == whole.captions
    np.testing.assert_array_equal(source.pixels(CHUNK + 4), parts[-1].pixels_BHWC[-1])
    (small,) = source.blocks(0, 4, size=8, height=32, width=48)
    assert small.pixels_BHWC.shape == (4, 32, 48, 3)


def test_generated_by_worker_processes_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(
        "transformers"
    )  # its lazy modules made pickling search through them, and fail
    monkeypatch.setattr("examples.shapes.images.CHUNK", 3)
    source = open_images(f"{SHAPES}:24", seed=5)
    pixels = {}
    for num_workers in (1, 2):
        monkeypatch.setattr(
            "examples.shapes.images.share_of_cores",
            lambda most, num_workers=num_workers: num_workers,
        )
        pixels[num_workers] = [
            block.pixels_BHWC for block in source.blocks(0, 24, size=3, height=64, width=64)
        ]
    np.testing.assert_array_equal(np.stack(pixels[1]), np.stack(pixels[2]))


def test_generated_images_stay_the_same() -> None:
    """A run's data belong to its seed, whatever the version."""
    source = open_images(f"{SHAPES}:{CHUNK + 20}:7", seed=0)
    (block,) = source.blocks(CHUNK, CHUNK + 2, size=8, height=64, width=64)
    assert list(block.captions) == CAPTIONS_OF_SEED_7
    means = block.pixels_BHWC.mean(axis=(1, 2, 3))
    assert means == pytest.approx(MEANS_OF_SEED_7, abs=0.1)


def test_identity_of_generated_images() -> None:
    names = [f"{SHAPES}:40", f"{SHAPES}:40:1", f"{SHAPES}:41:1"]
    assert len({open_images(name, seed=0).fingerprint for name in names}) == 3
    given, drawn = open_images(names[1], seed=0), open_images(names[0], seed=1)
    assert given.fingerprint == drawn.fingerprint
    assert (len(drawn), drawn.name, drawn.where(3)) == (40, names[0], f"{names[0]}: image 3")


def test_worker_processes_import_no_torch() -> None:
    program = "import sys, examples.shapes.world; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n" and make_chunk.__module__ == "examples.shapes.world"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("shapes:60:11", "say data.images=examples.shapes.images:ShapesImages:60:11"),
        ("no_such_package:Images", "module 'no_such_package' cannot be imported .*PYTHONPATH"),
        ("examples.shapes.images:Shapes", "has no 'Shapes'.*did you mean 'ShapesImages'"),
        ("examples.shapes.world:Scene", "not a class derived from .*images.ImageSource"),
        (SHAPES, "missing 1 required positional argument: 'count'"),
        (f"{SHAPES}:", "COUNT='' must be a whole number"),
        (f"{SHAPES}:x", "COUNT='x' must be a whole number"),
        (f"{SHAPES}:0", "0 images, need at least 1"),
        (f"{SHAPES}:10:x", "SEED='x' must be a whole number"),
        (f"{SHAPES}:10:1:2", "takes from 2 to 3 positional arguments"),
        (f"{SHAPES}:-5", "COUNT='-5'"),
        (f"{SHAPES}:²", "COUNT='²'"),
    ],
)
def test_wrong_classes_of_images_are_refused(name: str, words: str) -> None:
    with pytest.raises(ValueError, match=f"data.images={name}.*{words}"):
        open_images(name, seed=0)


def test_the_class_of_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[3] / "docs/sft.md").read_text()
    (code,) = re.findall(r"```python\n(# my_images.py.*?)```", page, re.DOTALL)
    (tmp_path / "my_images.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    source = open_images("my_images:GreyImages:5", seed=0)
    blocks = list(source.blocks(1, 3, size=8, height=150, width=150))
    assert [list(block.captions) for block in blocks] == [["grey of level 1", "grey of level 2"]]
    assert (len(source), blocks[0].num_enlarged) == (5, 2)
    assert blocks[0].pixels_BHWC[:, 0, 0, 0].tolist() == [1, 2]
    assert source.where(4) == "my_images:GreyImages:5: image 4"
