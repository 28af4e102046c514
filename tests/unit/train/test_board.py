"""Ranks read each other's words from a network filesystem that may fail for a moment."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megadiff.train import board as board_module
from megadiff.train import rescue as rescue_module
from megadiff.train.board import Board, disagreement


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


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the files that are read from now on."""
    names: list[str] = []
    real = board_module._read

    def read(path: Path) -> dict[str, object]:
        names.append(path.name)
        return real(path)

    monkeypatch.setattr(board_module, "_read", read)
    return names


def say_as(board: Board, rank: int, phase: str, **changes: object) -> None:
    peer = Board(board.folder, rank=rank, world_size=3)
    peer.say(phase=phase, **changes)


def test_waiting_for_one_rank_reads_its_file_alone(board, reads):
    (state,) = board.wait_for("done", ranks=[0], timeout_s=0.2)
    assert state.phase == "running"
    say_as(board, 0, "done")
    (state,) = board.wait_for("done", ranks=[0], timeout_s=20)
    assert state.phase == "done"
    assert set(reads) == {"rank_00000.json"}


def test_states_that_have_come_are_not_read_again(board, reads):
    say_as(board, 0, "closed", steps=4)
    say_as(board, 1, "closed", steps=4)
    threading.Timer(0.3, say_as, (board, 2, "closed"), {"steps": 5}).start()
    states = board.wait_for("closed", timeout_s=20)
    assert [state.steps for state in states] == [4, 4, 5]
    assert reads.count("rank_00000.json") == reads.count("rank_00001.json") == 1
    assert reads.count("rank_00002.json") > 2


def test_a_rank_that_ends_after_it_has_come_still_counts(board, reads):
    """What it said stands; whoever needs more of it finds it gone at the next phase."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    say_as(board, 0, "settled", pid=ended.pid)
    say_as(board, 1, "settled")
    say_as(board, 2, "settled")
    states = board.wait_for("settled", timeout_s=20)
    assert disagreement(states) == ""
    assert board.neighbour_is_gone()
    began = time.monotonic()
    say_as(board, 1, "saved")
    say_as(board, 2, "saved")
    states = board.wait_for("saved", timeout_s=20)
    assert time.monotonic() - began < 5
    assert [state.has_come("saved") for state in states] == [False, True, True]


@pytest.mark.parametrize(
    ("local_rank", "world_size", "pause_s"),
    [(0, 512, 0.0), (3, 64, 0.0), (3, 128, 2.0), (3, 480, 7.5), (3, 4096, 7.5)],
)
def test_ranks_of_a_large_world_look_less_often(
    tmp_path, monkeypatch, local_rank, world_size, pause_s
):
    """A node's first rank looks whenever it listens, and all do where they are few."""
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    now_s = [1000.0]
    monkeypatch.setattr(board_module.time, "monotonic", lambda: now_s[0])
    board = Board(tmp_path / ".ranks-a", rank=0, world_size=world_size)
    assert board.is_due()
    assert board.is_due() == (not pause_s)
    now_s[0] += pause_s
    assert board.is_due()
    assert pause_s < rescue_module.ANSWER_S / 3
