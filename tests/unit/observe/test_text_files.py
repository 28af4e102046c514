"""A text file is written whole, whoever else writes it, and in place of nothing else."""

import os
import stat
import threading
from pathlib import Path

import pytest

from megadiff.observe import text_files
from megadiff.observe.text_files import write_whole

SIZE = 1_000_000


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere" / "page.html"
    target.parent.mkdir()
    link = tmp_path / "page.html"
    link.symlink_to(target)

    for text in ("new", "again"):
        write_whole(link, text)
        assert link.is_symlink() and target.read_text() == text
    assert [*target.parent.iterdir()] == [target]


def test_what_is_no_file_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    # Both ends, so that neither waits for the other.
    descriptor = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    write_whole(pipe, "a line")

    assert os.read(descriptor, 100) == b"a line"
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    os.close(descriptor)


def test_two_writers_publish_whole_files(tmp_path: Path) -> None:
    page = tmp_path / "page.html"

    errors: list[OSError] = []

    def write(character: str) -> None:
        try:
            for _ in range(20):
                write_whole(page, character * SIZE)
        except OSError as error:  # another one renamed what this one wrote
            errors.append(error)

    write("a")
    writers = [threading.Thread(target=write, args=(character,)) for character in "ab"]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        text = page.read_text()
        assert text in ("a" * SIZE, "b" * SIZE)
    for writer in writers:
        writer.join()
    assert not errors
    assert [*tmp_path.iterdir()] == [page]


def test_nothing_is_left_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "page.html", "whole")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "page.html").stat().st_mode) == 0o640

    monkeypatch.setattr(text_files.os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "page.html", "half")
    with pytest.raises(UnicodeEncodeError):
        write_whole(tmp_path / "page.html", "\ud800")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["whole"]
