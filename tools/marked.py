"""Find what a tool's runs have left, by a mark in the environment that they were started with."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]


def python_path() -> str:
    """Return PYTHONPATH with this repository in front."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def marked(variable: str, mark: str) -> list[psutil.Process]:
    """Return all other processes that carry the mark, renamed or not."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            is_marked = process.environ().get(variable) == mark
            if is_marked and process.pid != os.getpid() and process.status() != "zombie":
                found.append(process)
    return found


def kill_left(variable: str, mark: str, *, after_s: float) -> list[str]:
    """Kill those with the mark that do not end by themselves, and return what they were."""
    deadline_s = time.monotonic() + after_s
    while (left := marked(variable, mark)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    texts = [str(process) for process in left]  # a killed one has neither name nor state
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    return texts
