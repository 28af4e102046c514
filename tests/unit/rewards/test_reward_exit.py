"""A program ends as it would without rewards, while calls of theirs run: no abort, no hang."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # each test is a program that imports torch
PROGRAMS = Path(__file__).with_name("programs.py")


def run(reward: str, how: str) -> tuple[int, str, float]:
    """Exit code, stderr, seconds."""
    started = time.monotonic()
    command = [sys.executable, str(PROGRAMS), reward, how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stderr, time.monotonic() - started


@pytest.mark.parametrize("reward", ["Torch", "Onnx"])
@pytest.mark.parametrize(("how", "code"), [("raise", 1), ("exit", 3), ("close", 0)])
def test_no_worker_is_inside_a_library_when_python_ends(reward: str, how: str, code: int) -> None:
    if reward == "Onnx":
        pytest.importorskip("rapidocr_onnxruntime")
    found, text, _ = run(reward, how)
    assert found == code, text
    assert "terminate called" not in text


@pytest.mark.parametrize("how", ["close", "raise"])
def test_a_call_that_cannot_be_interrupted_does_not_keep_the_process(how: str) -> None:
    code, text, seconds = run("Sleeps", how)
    assert code == 1
    assert "a reward's call does not end" in text
    assert "in score" in text
    assert seconds < 30


def test_a_call_that_keeps_the_gil_is_shown_and_ends_the_process() -> None:
    code, text, seconds = run("KeepsTheGil", "collect")
    assert code == 1
    assert "Timeout (0:00:02)!" in text
    assert "_exit_if_the_gil_is_kept" in text
    assert f'"{PROGRAMS}", line' in text
    assert seconds < 30


def test_a_long_wait_that_gives_the_gil_back_is_no_reason_to_end() -> None:
    """Its call takes three times as long as the GIL may be kept."""
    assert run("Slow", "collect")[:2] == (0, "")
