"""Ask what may never answer: a driver, a network folder, another node. Each has a deadline."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

Answer = TypeVar("Answer")
LOOK_S = 0.05  # between two looks whether a process has ended
LAST_CHARS = 300  # of a failed process's stderr


class ProbeError(OSError):
    """A probe failed or did not answer in time; the text says which."""


def within(seconds: float, call: Callable[[], Answer]) -> Answer:
    """Return what a call returns, and raise what it raises.

    Raises ProbeError when it takes longer. Its thread is then left behind: a call that waits for a
    dead file server cannot be ended.
    """
    answers: list[Answer] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(call())
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if failures:
        raise failures[0]
    if not answers:
        raise ProbeError(f"no answer within {seconds:g} s")
    return answers[0]


def output_of(command: Sequence[str], *, timeout_s: float) -> str:
    """Return a process's stdout. Raises ProbeError when it fails, is not there or takes longer."""
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                # a group of its own, so that its children end with it
                start_new_session=True,
            )
        except OSError as failure:
            raise ProbeError(f"{command[0]} did not start: {failure.strerror}") from failure

        # Not by wait(): a process that hangs in its driver stays, even after SIGKILL.
        deadline = time.monotonic() + timeout_s
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise ProbeError(f"{' '.join(command[:3])} gave no answer within {timeout_s:g} s")

        stdout.seek(0)
        stderr.seek(0)
        if process.returncode:
            last = stderr.read().decode("utf-8", errors="replace").strip()[-LAST_CHARS:]
            raise ProbeError(f"{' '.join(command[:3])} ended with {process.returncode}: {last}")
        return stdout.read().decode("utf-8", errors="replace")
