"""A checkpoint that is written in the background is that of its step, whole or not there."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import Tensor

from megadiff.checkpoint import background, checkpoints
from megadiff.checkpoint.checkpoints import CheckpointError, Checkpoints
from megadiff.checkpoint.retention import remove_leftovers
from megadiff.checkpoint.run_folders import whole_looking
from megadiff.process import host_memory
from megadiff.tensors import snapshot
from megadiff.tensors.snapshot import Snapshot
from megadiff.types import Progress
from tests.unit.checkpoint.runs import NAMES, Trained, loaded, names_in, run_of

ROOT = Path(__file__).parents[3]
WAIT_S = 20.0
NUM_KILLS = 24


def wait_until_saved(run: Checkpoints, step: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while run.saved_step < step:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let no background write go on until the event is set."""
    goes_on = threading.Event()
    stock_write = Snapshot.write

    def slow_write(self: Snapshot, folder: Path, given_up: threading.Event) -> None:
        assert goes_on.wait(WAIT_S)
        stock_write(self, folder, given_up)

    monkeypatch.setattr(Snapshot, "write", slow_write)
    yield goes_on
    goes_on.set()


def test_the_saved_bits_are_those_of_the_step(tmp_path: Path, disk: threading.Event) -> None:
    run = run_of(tmp_path, every=1)
    engine = Trained()
    run.after_step(engine, engine.train(1))
    run.config.checkpoint.every = 0
    for step in (2, 3):
        run.after_step(engine, engine.train(step))
        assert names_in(run) == [".writing_step_000001"] and not run.saved_step
    disk.set()
    run.settle()
    assert names_in(run) == ["step_000001"] and run.in_flight is None
    assert loaded(run_of(tmp_path)).step == 1


def test_it_has_its_name_before_the_step_ends(tmp_path: Path) -> None:
    """A step takes minutes: a rank that is killed in it must not take a whole checkpoint along."""
    run = run_of(tmp_path)
    engine = Trained()
    run.save(engine, engine.train(1))
    wait_until_saved(run, 1)
    assert loaded(run_of(tmp_path)).step == 1
    run.settle()
    assert names_in(run) == ["step_000001"]


def test_a_moment_of_the_filesystem_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 looks for the parts again; what is whole on the disk stays."""
    num_looks = 0
    listed = os.listdir

    def stale_once(folder: Path) -> list[str]:
        nonlocal num_looks
        num_looks += 1
        if num_looks == 1:
            raise OSError(116, "Stale file handle")
        return listed(folder)

    monkeypatch.setattr(checkpoints.os, "listdir", stale_once)
    run = run_of(tmp_path)
    engine = Trained()
    run.save(engine, engine.train(1))
    wait_until_saved(run, 1)
    run.settle()
    assert num_looks > 1 and names_in(run) == ["step_000001"] and loaded(run_of(tmp_path)).step == 1


def test_a_moment_of_the_filesystem_as_the_step_ends_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the tries before have written: the checkpoint loads."""
    num_tries = 0
    put_away = checkpoints.put_away_other_history

    def stale_at_first(folder: Path, step: int) -> None:
        nonlocal num_tries
        num_tries += 1
        if num_tries <= 2:
            raise OSError(116, "Stale file handle")
        put_away(folder, step)

    monkeypatch.setattr(checkpoints, "put_away_other_history", stale_at_first)
    monkeypatch.setattr(Checkpoints, "_complete_early", lambda *_: None)
    run = run_of(tmp_path)
    engine = Trained()
    run.save(engine, engine.train(1))
    run.settle()
    assert (
        num_tries == 3 and names_in(run) == ["step_000001"] and loaded(run_of(tmp_path)).step == 1
    )


def test_the_next_one_waits_for_the_one_before(tmp_path: Path, disk: threading.Event) -> None:
    """Both would lie in the same memory."""
    run = run_of(tmp_path, every=1)
    engine = Trained()
    run.after_step(engine, engine.train(1))
    threading.Timer(0.3, disk.set).start()
    run.after_step(engine, engine.train(2))
    run.settle()
    assert names_in(run) == ["step_000001", "step_000002"]
    assert loaded(run_of(tmp_path)).step == 2


def test_a_full_disk_is_told_at_the_end_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path, every=5)
    engine = Trained()
    run.after_step(engine, engine.train(5))
    run.settle()
    # the disk is full when most of the file is written
    num_written = 0
    stock_fingerprint = snapshot.fingerprint

    def full(tensor: Tensor) -> str:
        nonlocal num_written
        num_written += 1
        if num_written == len(NAMES):
            raise OSError(28, "No space left on device")
        return stock_fingerprint(tensor)

    with monkeypatch.context() as patched, pytest.raises(CheckpointError) as caught:
        patched.setattr(snapshot, "fingerprint", full)
        for step in range(10, 1000):
            run.after_step(engine, engine.train(step))
            run.config.checkpoint.every = 0
            time.sleep(0.01)
    assert "step_000010 could not be written, earlier ones are whole" in str(caught.value)
    assert "No space left on device" in str(caught.value)
    assert names_in(run) == ["step_000005"] and loaded(run_of(tmp_path)).step == 5
    run.save(engine, engine.train(12))  # space was made
    run.settle()
    assert loaded(run_of(tmp_path)).step == 12


def test_a_record_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts are whole, and the disk is full when rank 0 completes them in its thread."""
    run = run_of(tmp_path)
    engine = Trained()

    def full(folder: Path, progress: Progress) -> bytes:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "progress_record", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        run.save(engine, engine.train(1))
        run.settle()
    assert names_in(run) == []


def test_without_memory_for_a_copy_it_is_written_in_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_of(tmp_path)
    engine = Trained()
    num_bytes = engine.snapshot().num_bytes
    monkeypatch.setattr(background, "free_bytes", lambda: 2 * num_bytes - 1)
    for step in (1, 2):
        run.save(engine, engine.train(step))
        assert run.saved_step == step and run.in_flight is None
    assert caplog.text.count("checkpoints are written while training waits") == 1
    monkeypatch.setattr(background, "free_bytes", lambda: 2 * num_bytes)
    writers: list[threading.Thread] = []
    monkeypatch.setattr(
        Snapshot, "write", lambda self, *_: writers.append(threading.current_thread())
    )
    with pytest.raises(CheckpointError, match="rank 0 does not see what ranks .0. wrote"):
        run.save(engine, engine.train(3))
        run.settle()
    assert len(writers) == 1 and writers[0] is not threading.main_thread()


def test_ranks_of_a_node_divide_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    alone = host_memory.free_bytes()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert host_memory.free_bytes() == pytest.approx(alone / 8, rel=0.3)


def test_a_jobs_own_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Slurm and containers set it, on any folder above the process's own."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    job = tmp_path / "system.slice" / "job_12"
    task = job / "step_0"
    task.mkdir(parents=True)
    (tmp_path / "own").write_text("4:memory:/elsewhere\n0::/system.slice/job_12/step_0\n")
    (task / "memory.max").write_text("max\n")
    (job / "memory.max").write_text("1000\n")
    (job / "memory.current").write_text("900\n")
    (job / "memory.stat").write_text("anon 500\nactive_file 100\ninactive_file 200\n")
    monkeypatch.setattr(host_memory, "CGROUPS", tmp_path)
    monkeypatch.setattr(host_memory, "PROCESS_CGROUPS", tmp_path / "own")
    assert host_memory.free_bytes() == 400
    assert host_memory.total_bytes() == 1000


def test_a_clock_makes_checkpoints_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr(checkpoints.time, "monotonic", lambda: now_s)
    run = run_of(tmp_path, every=0, every_min=10.0)
    run.config.train.num_steps = 7
    engine = Trained()
    saved = []
    for step in range(1, 8):
        now_s += 4 * 60
        run.after_step(engine, engine.train(step))
        if run.in_flight or run.saved_step == step:
            saved.append(step)
        run.settle()
    assert saved == [3, 6, 7]  # 12 and 24 minutes in, and the last step
    saved_before = run.saved_step
    run.config.train.num_steps = 1000
    run.config.checkpoint.every_min = 0.0
    now_s += 1000 * 60
    run.after_step(engine, engine.train(8))
    assert run.in_flight is None and run.saved_step == saved_before


def test_a_rescue_of_a_newer_step_drops_the_write_in_flight(
    tmp_path: Path, disk: threading.Event
) -> None:
    run = run_of(tmp_path)
    engine = Trained()
    run.save(engine, engine.train(1))
    write = run.in_flight
    assert write
    progress = engine.train(3)
    aside = run.begin_rescue(3)
    assert not write.aside.exists()
    disk.set()
    engine.snapshot().write(aside, threading.Event())
    run.complete(aside, progress)
    assert names_in(run) == ["step_000003"] and run.saved_step == 3
    assert loaded(run_of(tmp_path)).step == 3
    time.sleep(3 * checkpoints.LOOK_S)
    # nothing tells the main thread that it has ended: it must not raise while a rescue goes on
    assert not write.has_ended and names_in(run) == ["step_000003"]


NUM_ELEMENTS = 1 << 19  # three tensors of 2 MiB, so that a kill falls into their write


@pytest.mark.slow
def test_killed_at_random_moments_of_a_background_write(tmp_path: Path) -> None:
    """A real process that saves again and again is killed; a whole checkpoint is always there."""
    subprocess.run([sys.executable, "-m", __name__, str(tmp_path)], check=True, cwd=ROOT)
    folders = sorted(tmp_path.iterdir())
    assert len(folders) == NUM_KILLS
    num_torn = 0
    for folder in folders:
        before = len(list((folder / "checkpoints").glob(".writing_step_*")))
        newest = whole_looking(folder / "checkpoints")[-1].name
        run = run_of(folder)
        assert f"step_{loaded(run, NUM_ELEMENTS).step:06d}" == newest
        engine = Trained(NUM_ELEMENTS)
        run.save(engine, engine.train(900_000))
        run.settle()
        remove_leftovers(run.folder)
        assert not list(run.folder.glob(".*"))
        num_torn += before
    assert num_torn >= NUM_KILLS // 4  # they did fall into a write


def _save_for_ever(folder: Path) -> None:
    run = run_of(folder, every=1)
    engine = Trained(NUM_ELEMENTS)
    for step in range(1, 900_000):
        run.after_step(engine, engine.train(step))
        time.sleep(0.002)


def _kill_one(folder: Path, source: random.Random) -> None:
    child = os.fork()
    if child == 0:
        try:
            _save_for_ever(folder)
        finally:
            os._exit(4)
    deadline = time.monotonic() + WAIT_S
    while not (folder / "checkpoints" / "latest").exists():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    time.sleep(source.uniform(0.0, 0.2))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), status


if __name__ == "__main__":
    random_source = random.Random(0)
    for number in range(NUM_KILLS):  # forks from a process without threads
        _kill_one(Path(sys.argv[1]) / f"{number:02d}", random_source)
