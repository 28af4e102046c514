"""A folder has one run; the next one is told whose it is, and waits for one that is ending."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from megadiff.train.run_lock import LOCK, lock

HOLD = """
import os, sys, time
from contextlib import ExitStack
from pathlib import Path
from megadiff.train.run_lock import lock
with ExitStack() as stack:
    lock(Path(sys.argv[1]), stack)
    print("holds", flush=True)
    time.sleep(float(sys.argv[2]))
"""


@pytest.fixture
def hold():
    """Starts a process that holds a folder's lock for some seconds."""
    started = []

    def start(folder: Path, seconds: float) -> subprocess.Popen:
        command = [sys.executable, "-c", HOLD, str(folder), str(seconds)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "holds\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_working_holder_is_named_at_once(tmp_path, hold):
    holder = hold(tmp_path, 60)
    began = time.monotonic()
    with (
        ExitStack() as stack,
        pytest.raises(ValueError, match=f"in use by.*pid {holder.pid} on") as refused,
    ):
        lock(tmp_path, stack)
    assert time.monotonic() - began < 5
    assert "since 20" in str(refused.value) and "another run.name" in str(refused.value)
    holder.kill()
    holder.wait()
    with ExitStack() as stack:
        lock(tmp_path, stack)


def test_a_holder_whose_launcher_is_gone_is_waited_for(tmp_path, hold, caplog):
    hold(tmp_path, 2)
    row = json.loads((tmp_path / LOCK).read_text())
    ended = subprocess.Popen(["true"])
    ended.wait()
    (tmp_path / LOCK).write_text(json.dumps(row | {"launcher": ended.pid}))
    with ExitStack() as stack:
        lock(tmp_path, stack, wait_s=30)
    assert "which may be ending or gone; waiting 30 s" in caplog.text
    assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


def test_a_lock_that_no_one_gives_back_is_given_up(tmp_path, hold):
    hold(tmp_path, 60)
    row = json.loads((tmp_path / LOCK).read_text())
    (tmp_path / LOCK).write_text(json.dumps(row | {"host": "node7/boot"}))
    with ExitStack() as stack, pytest.raises(ValueError, match="on node7 since"):
        lock(tmp_path, stack, wait_s=1)


def test_a_filesystem_without_locks_says_so(tmp_path, monkeypatch, caplog):
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with ExitStack() as stack:
        lock(tmp_path, stack)
    assert "a filesystem without locks (Operation not supported)" in caplog.text
    other = subprocess.Popen(["sleep", "60"])
    try:
        row = json.loads((tmp_path / LOCK).read_text())
        (tmp_path / LOCK).write_text(json.dumps(row | {"pid": other.pid}))
        with ExitStack() as stack, pytest.raises(ValueError, match=f"pid {other.pid} on"):
            lock(tmp_path, stack, wait_s=1)
    finally:
        other.kill()
        other.wait()
