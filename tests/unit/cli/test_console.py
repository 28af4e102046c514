"""What the commands share."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import psutil
import pytest

CRASH = """
import os, signal
from megadiff.cli import main as command
command.main = lambda: os.kill(os.getpid(), signal.SIGSEGV)
command.entry()
"""


def test_a_crash_below_python_shows_where_it_was() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CRASH], capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in done.stderr and "in entry" in done.stderr


@pytest.mark.parametrize(("own_session", "stays"), [(False, False), (True, True)])
def test_children_that_are_left_end_with_the_command(own_session: bool, stays: bool) -> None:
    """A reward's, say; but not the browser, which is started in a session of its own."""
    program = f"""
import subprocess, sys
from megadiff.cli.console import leave
child = subprocess.Popen(
    ["sleep", "60"], start_new_session={own_session}, stdout=subprocess.DEVNULL
)
sys.stdout.write(str(child.pid))
leave(3)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 3
    child = int(done.stdout)
    if stays:
        psutil.Process(child).kill()
    else:
        deadline = time.monotonic() + 10
        while _runs(child):  # killed, but perhaps not yet gone
            assert time.monotonic() < deadline
            time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
