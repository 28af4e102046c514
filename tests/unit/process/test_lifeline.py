"""A process that serves another one does not outlive it, even when that is killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil
import pytest

from megadiff.process.lifeline import exit_with

SERVER = """
import subprocess, sys, time
from megadiff.process.lifeline import exit_with
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
