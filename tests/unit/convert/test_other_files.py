"""Files that are copied along with converted weights lie in SRC; links bring no others in."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from megadiff.convert import other_files as module
from megadiff.convert.other_files import other_files
from tests.unit.convert.conversions import contents, refused, run


def everything(root: Path) -> list[str]:
    return [str(path) for path in other_files(root, is_left_out=lambda _: False).files]


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("/etc/passwd", "is a link to /etc/passwd, outside of what is converted"),
        ("../../secret", "secret, outside of what is converted"),
        ("../../models--a--b/blobs/x", "x, outside of what is converted"),
        ("/etc", "is a link to the folder /etc, and links to folders are not followed"),
        (".", "tokenizer, and links to folders are not followed"),
        ("../vae", "vae, and links to folders are not followed"),
        ("/proc/self", "links to folders are not followed"),
        ("/dev/zero", "is a link to /dev/zero, outside of what is converted"),
        ("nowhere", "is a link to nothing"),
        ("link", "is a link to nothing"),
    ],
)
def test_a_link_that_leads_elsewhere_is_refused_at_once(
    model: Path, tmp_path: Path, capsys, target: str, text: str
) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "models--a--b" / "blobs").mkdir(parents=True)
    (tmp_path / "models--a--b" / "blobs" / "x").write_text("another repository's")
    (model / "tokenizer" / "link").symlink_to(target)
    start = time.monotonic()
    error = refused(capsys, model, tmp_path / "out")
    assert f"{model}/tokenizer/link" in error and text in error
    assert time.monotonic() - start < 20 and not (tmp_path / "out").exists()


def test_what_is_no_file_is_refused(model: Path, tmp_path: Path, capsys) -> None:
    os.mkfifo(model / "tokenizer" / "pipe")
    assert "pipe is neither a file nor a folder" in refused(capsys, model, tmp_path / "out")


def test_links_to_files_within_are_files_of_their_own(model: Path, tmp_path: Path) -> None:
    (model / "tokenizer" / "link.json").symlink_to("../model_index.json")
    linked = tmp_path / "linked"  # SRC itself may be a link
    linked.symlink_to(model)
    assert run(linked, tmp_path / "out", "--verify") == 0
    assert contents(tmp_path / "out") == contents(model)
    assert not (tmp_path / "out" / "tokenizer" / "link.json").is_symlink()


def test_a_snapshot_of_the_hub_cache_is_a_model(tiny_model: Path, tmp_path: Path) -> None:
    """All its files are links to blobs, beside the snapshots."""
    repository = tmp_path / "models--owner--name"
    blobs = repository / "blobs"
    snapshot = repository / "snapshots" / "0123abcd"
    blobs.mkdir(parents=True)
    for number, path in enumerate(sorted(tiny_model.rglob("*"))):
        place = snapshot / path.relative_to(tiny_model)
        if path.is_dir():
            place.mkdir(parents=True)
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, blobs / str(number))
        place.symlink_to(os.path.relpath(blobs / str(number), place.parent))
    assert run(snapshot, tmp_path / "out", "--verify") == 0
    assert contents(tmp_path / "out") == contents(tiny_model)
    (snapshot / "tokenizer" / "leak").symlink_to("/etc/passwd")
    with pytest.raises(ValueError, match="leak is a link to /etc/passwd"):
        everything(snapshot)


def test_a_folder_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        (tmp_path / str(number)).write_text("")
    assert everything(tmp_path) == ["0", "1", "2", "3", "4"]
    monkeypatch.setattr(module, "MAX_FILES", 4)
    with pytest.raises(ValueError, match="holds more than 4 files"):
        everything(tmp_path)
