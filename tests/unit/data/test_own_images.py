"""What a class of images lacks is told at the start, with the key that names it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megadiff.data.images import open_images

OWN_IMAGES = """
from megadiff.data.images import ImageSource

class Images(ImageSource):
    def __init__(self, count, per_item="1", fingerprint="", *, run_seed):
        self.count = int(count)
        self.images_per_item = int(per_item)
        if fingerprint:
            self.fingerprint = 7 if fingerprint == "number" else fingerprint

    def __len__(self):
        return self.count
"""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("0:1:a", "holds 0 captioned images, need at least 1"),
        ("3:1", "fingerprint=None must be a text .*set self.fingerprint in the class"),
        ("3:1:number", "fingerprint=7 must be a text"),
        ("3:2:a", "3 images are not a multiple of images_per_item=2: .* give both images of each"),
        ("4:2:a", ""),
        ("3:1:a", ""),
    ],
)
def test_what_a_class_lacks_is_told_with_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, words: str
) -> None:
    (tmp_path / "own_images.py").write_text(OWN_IMAGES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_images", raising=False)
    name = f"own_images:Images:{arguments}"
    if not words:
        assert len(open_images(name, seed=0)) == int(arguments[0])
        return
    with pytest.raises(ValueError, match=f"data.images={name}: {words}"):
        open_images(name, seed=0)
