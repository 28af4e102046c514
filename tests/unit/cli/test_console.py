"""What the commands share."""

from __future__ import annotations

import signal
import subprocess
import sys

CRASH = """
import os, signal
from megadiff.cli import main as command
command.main = lambda: os.kill(os.getpid(), signal.SIGSEGV)
command.entry()
"""


def test_a_crash_below_python_shows_where_it_was() -> None:
    done = subprocess.run([sys.executable, "-c", CRASH], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in done.stderr and "in entry" in done.stderr
