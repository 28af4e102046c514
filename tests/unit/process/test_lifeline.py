"""A process that serves another one does not outlive it, even when that is killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil
import pytest

from megadiff.process.lifeline import exit_with, launcher_pid

SERVER = """
import subprocess, sys, time
from megadiff.process.lifeline import exit_with, launcher_pid
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
exit_with(int(sys.argv[1]))
print(worker.pid, flush=True)
time.sleep(60)
"""


def test_killed_parent_takes_server_and_its_workers_along() -> None:
    parent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(parent.pid)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        worker_pid = int(server.stdout.readline())
        assert server.poll() is None
        parent.kill()
        parent.wait()
        server.wait(10)
        deadline = time.monotonic() + 5
        while _runs(worker_pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not _runs(worker_pid)
    finally:
        for process in (parent, server):
            process.kill()
            process.wait()


def test_a_parent_that_is_gone_already() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    with pytest.raises(ValueError, match=f"process {child.pid} does not exist"):
        exit_with(child.pid)
    assert os.getpid()  # and this process lives


def _runs(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


ORPHAN = """
import os, sys, time
while os.getppid() == int(sys.argv[1]):
    time.sleep(0.01)
from megadiff.process.lifeline import launcher_pid
try:
    print(launcher_pid())
except ProcessLookupError as error:
    print(error)
"""
LAUNCHER = """
import os, subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())], start_new_session=True)
"""


def test_a_rank_knows_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert launcher_pid() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    script = "from megadiff.process.lifeline import launcher_pid; print(launcher_pid())"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) == os.getpid()
    # A shell script between torchrun and the rank is as good. The echo keeps the shell from
    # becoming the rank.
    shell = ["sh", "-c", '"$@"; echo $$', "sh", *command]
    done = subprocess.run(shell, capture_output=True, text=True, check=True)
    parent, shells_own = done.stdout.split()
    assert parent == shells_own


def test_a_launcher_that_died_during_imports_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    if "python" in " ".join(psutil.Process(1).cmdline()):
        pytest.skip("orphans become children of a Python process here")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    command = [sys.executable, "-c", LAUNCHER, ORPHAN]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert "is gone" in done.stdout
