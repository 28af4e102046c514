"""Ranks that are stopped at any moment come to one optimizer step, and save that one."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from megadiff.train import rescue as rescue_module
from megadiff.train.board import Board, RankState, RunAlarm, disagreement
from tests.distributed.ranks import run_command
from tests.unit.train.rescued import UPDATES_PER_STEP, Rank, laid_out

ROOT = Path(__file__).parents[3]


def run_all(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def start_ranks(folder: Path, size: int, seed: int) -> tuple[list[Rank], threading.Barrier]:
    ranks = laid_out(folder, size, seed)
    reduce = threading.Barrier(size)
    for rank in ranks:
        threading.Thread(target=rank.train, args=(reduce,), daemon=True).start()
    return ranks, reduce


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 5])
def test_ranks_stopped_at_random_moments_save_one_finished_step(tmp_path, size):
    """A signal reaches the ranks one after another, at any place of a step."""
    for seed in range(12):
        folder = tmp_path / str(seed)
        folder.mkdir()
        source = random.Random(1000 + seed)
        ranks, reduce = start_ranks(folder, size, seed)
        time.sleep(source.uniform(0.0, 0.15))
        rescues = []
        for rank in source.sample(ranks, size):
            time.sleep(source.uniform(0.0, 0.01))
            rescues.append(threading.Thread(target=rank.rescue.rescue, args=("SIGTERM",)))
            rescues[-1].start()
        for thread in rescues:
            thread.join(30)
            assert not thread.is_alive()
        reduce.abort()
        saved = sorted(path.name for path in folder.glob("step_*"))
        steps = ranks[0].progress.step
        if not steps:
            assert not saved
            continue
        assert saved == [f"step_{steps}"], (seed, saved)
        weights = [json.loads(path.read_text()) for path in (folder / saved[0]).iterdir()]
        assert weights == [UPDATES_PER_STEP * steps] * size, (seed, weights)


def test_a_rank_that_is_gone_is_named(tmp_path, caplog):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    ranks = laid_out(tmp_path, 2)
    ranks[1].rescue.board.say(pid=ended.pid)
    ranks[0].rescue.finish_step(ranks[0].progress, {})
    began = time.monotonic()
    ranks[0].rescue.rescue("SIGTERM")
    assert time.monotonic() - began < 10
    assert f"nothing was saved, rank 1 (pid {ended.pid} on" in caplog.text
    assert "there is no checkpoint" in caplog.text
    assert not list(tmp_path.glob("step_*"))


def test_a_part_that_cannot_be_written_is_said(tmp_path, caplog, monkeypatch):
    (rank,) = laid_out(tmp_path, 1)
    rank.rescue.finish_step(rank.progress, {})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rank.engine, "save_now", full)
    rank.rescue.rescue("AgreedError: the judge is out")
    assert "AgreedError: the judge is out: nothing was saved" in caplog.text
    assert "No space left on device" in caplog.text


def test_a_copy_that_hangs_keeps_no_process_whose_launcher_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(rescue_module, "RESCUE_S", 0.5)
    monkeypatch.setattr(rescue_module, "LEAVE_S", 0.1)
    (rank,) = laid_out(tmp_path, 1)
    monkeypatch.setattr(rank.engine, "save_now", lambda *_: threading.Event().wait())
    rank.rescue.finish_step(rank.progress, {})
    rank.rescue.start(ends_process=False)
    try:
        ends = threading.Thread(target=rank.rescue.launcher_gone, daemon=True)
        ends.start()
        ends.join(20)
        assert not ends.is_alive()
        assert rank.rescue._thread.is_alive()
    finally:
        rank.rescue.stop()


def test_an_error_that_a_rescue_brought_about_is_no_news(tmp_path, monkeypatch):
    """A rescue may abort collectives, which the main thread is in."""
    (rank,) = laid_out(tmp_path, 1)
    rescue = rank.rescue
    rescue.finish_step(rank.progress, {})
    rescue.exit_code = 143
    stock_save, is_saving = rank.engine.save_now, threading.Event()

    def save_now(*arguments) -> None:
        stock_save(*arguments)
        is_saving.set()
        time.sleep(0.3)

    monkeypatch.setattr(rank.engine, "save_now", save_now)
    monkeypatch.setattr(
        rescue, "_thread", threading.Thread(target=rescue.rescue, args=("SIGTERM",), daemon=True)
    )
    rescue._thread.start()
    assert is_saving.wait(20)
    with pytest.raises(SystemExit) as ended:
        rescue.failed(RuntimeError("the communicator was aborted"))
    assert ended.value.code == 143
    assert (tmp_path / "step_1").is_dir()  # it was waited for


def test_ranks_leave_the_look_at_all_parts_to_rank_0(tmp_path, monkeypatch):
    """With hundreds of ranks each would read hundreds of files, and again until all are there."""
    ranks = laid_out(tmp_path, 3)
    looks = []
    for number, rank in enumerate(ranks):
        board = rank.rescue.board
        rank.rescue.finish_step(rank.progress, {})
        wait_for = board.wait_for

        def look(phase, *, number=number, wait_for=wait_for, **options):
            looks.append((number, phase))
            return wait_for(phase, **options)

        monkeypatch.setattr(board, "wait_for", look)

    threads = [threading.Thread(target=rank.rescue.rescue, args=("SIGTERM",)) for rank in ranks]
    run_all(threads)
    assert (tmp_path / "step_1").is_dir()
    assert [number for number, phase in looks if phase == "saved"] == [0]


def test_a_part_of_rank_0_that_fails_lets_no_rank_leave_before_the_others(tmp_path, monkeypatch):
    """Its error says nothing of them, and torchrun ends all ranks with the first that ends."""
    ranks = laid_out(tmp_path, 3)
    written = []

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def slow(*_: object) -> None:
        time.sleep(1.5)
        written.append(time.monotonic())

    monkeypatch.setattr(ranks[0].engine, "save_now", full)
    monkeypatch.setattr(ranks[2].engine, "save_now", slow)
    left = {}

    def run(number: int) -> None:
        ranks[number].rescue.rescue("SIGTERM")
        left[number] = time.monotonic()

    for rank in ranks:
        rank.rescue.finish_step(rank.progress, {})
    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    run_all(threads)
    assert min(left.values()) > written[0]


def test_ranks_of_two_policies_are_not_saved_together():
    first = RankState(rank=0, host="a", phase="settled", steps=4)
    assert disagreement([first, replace(first, rank=1)]) == ""
    text = disagreement([first, replace(first, rank=1, steps=5)])
    assert text == ("rank 0 is at optimizer step 4, rank 1 at 5: their weights are of two policies")
    assert "rank 1 does not answer" in disagreement([first, replace(first, rank=1, phase="closed")])
    failed = replace(first, rank=1, phase="closed", steps=0, error="OSError: no room")
    assert disagreement([first, failed]) == "rank 1 could not be saved: OSError: no room"
    # one that is ahead and fails to write does not keep others from writing: rank 0 waits for them
    assert disagreement([first, replace(first, rank=1, error="OSError: no room")]) == ""


def test_a_rescue_that_has_begun_on_any_rank_saves_in_place_of_the_loop(tmp_path):
    for elsewhere in (False, True):
        (rank,) = laid_out(tmp_path / str(elsewhere), 1)
        leaves = rank.rescue.leave_together(143, lambda begun, also=elsewhere: begun or also)
        assert leaves is rank.rescue._is_last_save is not elsewhere


def test_a_rank_that_never_steps_again_is_not_waited_for_long(tmp_path, caplog, monkeypatch):
    """Rank 1 stepped and rank 0's main thread is stuck before it: nothing whole can be saved."""
    monkeypatch.setattr(rescue_module, "CATCH_UP_S", 0.3)
    monkeypatch.setattr(rescue_module, "FINISH_S", 0.3)
    ranks = laid_out(tmp_path, 2)
    for rank in ranks:
        rank.rescue.finish_step(rank.progress, {})
    with ranks[1].engine.gate.step():
        pass
    threads = [threading.Thread(target=rank.rescue.rescue, args=("SIGTERM",)) for rank in ranks]
    run_all(threads)
    assert "rank 0 is at optimizer step 0, rank 1 at 1" in caplog.text


def test_words_on_the_board_survive_torn_and_missing_files(tmp_path):
    board = Board(tmp_path / ".ranks-a", rank=1, world_size=3)
    board.lay_out()
    board.say(steps=7)
    (tmp_path / ".ranks-a" / "rank_00002.json").write_bytes(b'{"rank": 2, "ho')
    assert [board.state(rank).steps for rank in range(3)] == [0, 7, 0]
    assert board.alarm() == RunAlarm()
    board.raise_alarm("first " + "x" * 10_000)
    board.raise_alarm("second")
    assert board.alarm().reason.startswith("first")
    later = Board(tmp_path / ".ranks-b", rank=0, world_size=1)
    later.lay_out()
    assert not (tmp_path / ".ranks-a").exists() and later.alarm() == RunAlarm()


def test_rank_0_on_a_node_that_is_gone_is_not_waited_for(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(rescue_module, "ANSWER_S", 0.5)
    rank = Rank(1, 2, tmp_path, random.Random(0))
    rank.rescue.board.lay_out()
    rank.rescue.board.say()
    rank.rescue.finish_step(rank.progress, {})
    rank.rescue._patience_s = 0.5
    began = time.monotonic()
    rank.rescue.rescue("SIGTERM")
    assert time.monotonic() - began < 10
    assert "nothing was saved, rank 0 does not answer" in caplog.text


def test_a_step_that_broke_off_is_not_saved(tmp_path, caplog):
    (rank,) = laid_out(tmp_path, 1)
    rank.rescue.finish_step(rank.progress, {})
    with pytest.raises(ZeroDivisionError):
        with rank.engine.gate.step():
            raise ZeroDivisionError
    rank.rescue.rescue("ZeroDivisionError")
    assert "nothing was saved" in caplog.text and "broke off half-way" in caplog.text
    assert not list(tmp_path.glob("step_*"))


def test_a_rank_reads_the_board_when_a_look_is_due(tmp_path, monkeypatch):
    (rank,) = laid_out(tmp_path, 1)
    rank.rescue.board.raise_alarm("rank 7 failed")
    monkeypatch.setattr(rank.rescue.board, "is_due", lambda: False)
    rank.rescue._look_around()
    assert not rank.rescue._reason
    monkeypatch.undo()
    rank.rescue._look_around()
    assert rank.rescue._reason == "rank 7 failed"


def test_a_look_that_fails_ends_no_run_and_is_said_once(tmp_path, caplog, monkeypatch):
    """A server that restarts answers no rank for a while; every rank looks once a second."""
    (rank,) = laid_out(tmp_path, 1)
    board = rank.rescue.board
    looks = []

    def fail() -> bool:
        looks.append(time.monotonic())
        if len(looks) == 4:
            rank.rescue._stopped.set()
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(board, "is_gone", fail)
    monkeypatch.setattr(rank.rescue.requests, "listen", lambda: None)
    rank.rescue._run()
    assert len(looks) == 4
    assert not board.state(0).error and not board.alarm().reason
    (warning,) = [record for record in caplog.records if "Stale" in record.message]
    assert warning.message.endswith("looking again")


def act(arguments: list[str]) -> int:
    """What a process does to itself, or waits for, while its rescue listens."""
    case = arguments[0]
    folder = Path(arguments[1])
    (rank,) = laid_out(folder, 1)
    rank.rescue.start(ends_process=case != "notebook")
    rank.rescue.finish_step(rank.progress, {})
    try:
        if case == "gate":  # it waits for a step that a rescue holds up
            rank.engine.gate.close()
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
            with rank.engine.gate.step():
                pass
        if case == "asked":  # the step that is on does not end
            (folder / "stop").write_text("2")
            time.sleep(60)
        if case == "asked twice":
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(3)
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(60)
        if case == "granted":
            rank.rescue.requests.step_ended()
            os.environ["MEGADIFF_STOP_GRACE_S"] = "60"
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(2.5)
            assert rank.rescue.requests.agreed_code() == 143
            assert rank.rescue.leave_together(143, bool)
            raise SystemExit(143)
        if case == "no board":
            shutil.rmtree(rank.rescue.board.folder)
            time.sleep(60)
        if case == "fork":
            child = os.fork()
            if not child:
                time.sleep(60)
                os._exit(0)
            time.sleep(0.5)
            os.kill(child, signal.SIGTERM)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
            time.sleep(2.5)
        if case == "other signal":
            signal.signal(signal.SIGALRM, lambda *_: None)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            time.sleep(2.5)
        if case == "notebook":  # asked twice while it saves, deaf when it should leave, asked again
            rescue_module.LEAVE_S = 0.5
            complete = rank.checkpoints.complete
            rank.checkpoints.complete = lambda *values: (time.sleep(4), complete(*values))
            for after_s in (0.1, 3.0):
                threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGINT)).start()
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
            time.sleep(7)
            with pytest.raises(SystemExit, match="130"):
                signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
            rank.rescue.stop()
            os.kill(os.getpid(), signal.SIGINT)
            assert not any(isinstance(thread, threading.Timer) for thread in threading.enumerate())
        if case == "closing":
            rank.rescue.stop()
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
    finally:
        rank.rescue.stop()
    sys.stdout.write("closed")
    return 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "code", "saved"),
    [
        ("gate", 143, True),
        ("asked", 75, True),
        ("asked twice", 75, False),
        ("granted", 143, False),
        ("no board", 1, False),
        ("fork", 0, False),
        ("other signal", 0, False),
        ("closing", 130, False),
        ("notebook", 0, True),
    ],
)
def test_signals_of_a_real_process(tmp_path, case, code, saved):
    began = time.monotonic()
    done = run_command(
        act, [case, str(tmp_path)], folder=ROOT, environment=os.environ, timeout_s=120
    )
    assert done.code == code, done.stderr
    assert bool(list(tmp_path.glob("step_*"))) == saved, done.stderr
    assert ("closed" in done.stdout) == (code == 0)
    # not by LEAVE_S after LEAVE_S, while imports alone may take 20 s of a busy machine
    assert time.monotonic() - began < 50
