"""Ranks read each other's words from a network filesystem that may fail for a moment."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

from megadiff.train.board import Board


@pytest.fixture
def board(tmp_path: Path) -> Board:
    board = Board(tmp_path / ".ranks-a", rank=1, world_size=3)
    board.lay_out()
    return board


def fail_stat(monkeypatch: pytest.MonkeyPatch, board: Board, number: int) -> None:
    """Let each look at the board's folder fail as a network filesystem does."""
    real = Path.stat

    def stat(path: Path, **options: bool) -> object:
        if path == board.folder:
            raise OSError(number, "injected", str(path))
        return real(path, **options)

    monkeypatch.setattr(Path, "stat", stat)


def test_a_folder_is_gone_when_it_is_missing_twice(board):
    assert not board.is_gone()
    aside = board.folder.with_name("aside")
    board.folder.rename(aside)
    assert not board.is_gone()
    aside.rename(board.folder)
    assert not board.is_gone()
    shutil.rmtree(board.folder)
    assert [board.is_gone(), board.is_gone()] == [False, True]


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EACCES])
def test_a_filesystem_that_does_not_answer_says_nothing_of_the_folder(board, monkeypatch, number):
    shutil.rmtree(board.folder)
    assert not board.is_gone()
    with monkeypatch.context() as patch:
        fail_stat(patch, board, number)
        with pytest.raises(OSError, match="injected"):
            board.is_gone()
    assert [board.is_gone(), board.is_gone()] == [False, True]
