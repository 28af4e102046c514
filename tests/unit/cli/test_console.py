"""What the commands share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from megadiff.cli.console import SHOW_ALL

NOISE = """
import logging, warnings
from megadiff.cli.console import quiet_imports
quiet_imports()
logging.basicConfig()
logger = logging.getLogger("transformers.configuration_utils")
logger.warning("`torch_dtype` is deprecated! Use `dtype` instead!")
logger.warning("another thing")
logger.error("`torch_dtype` is deprecated, and this is an error")
warnings.warn("FSDP2-wrapped module (FSDPModel) returned a view tensor. An in-place", UserWarning)
warnings.warn("something new", UserWarning)
"""
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


@pytest.mark.parametrize("shown", [False, True])
def test_known_notes_of_libraries_are_silent_unless_asked_for(shown: bool) -> None:
    environment = os.environ | {SHOW_ALL: "1" if shown else ""}
    done = subprocess.run(
        [sys.executable, "-c", NOISE], capture_output=True, text=True, check=True, env=environment
    )
    assert ("use `dtype` instead" in done.stderr.lower()) == shown
    assert ("returned a view tensor" in done.stderr) == shown
    for text in ("another thing", "this is an error", "something new"):
        assert text in done.stderr


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


INTERRUPT = """
import os, signal, sys
from megadiff.cli import main as command

def press(name):
    os.kill(os.getpid(), signal.SIGINT)
    raise AssertionError("an import that swallows what Ctrl-C raises")

signal.signal(signal.SIGINT, signal.default_int_handler)
if sys.argv.pop() == "import":
    command.importlib.import_module = press
else:
    module = type("Module", (), {"main": press})
    command.importlib.import_module = lambda name: module
command.entry()
"""


@pytest.mark.parametrize("when", ["import", "work"])
@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("train", "stopped by Ctrl-C before the first step; nothing was saved\n"),
        ("report", "interrupted\n"),
    ],
)
def test_ctrl_c_is_one_line(command: str, line: str, when: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPT, command, when],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (130, line)


@pytest.mark.parametrize("command", [["--help"], ["train", "--help-config"]])
def test_a_reader_that_leaves_ends_it_quietly(command: list[str]) -> None:
    """As `| head` does."""
    program = [sys.executable, "-m", "megadiff.cli.main", *command]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 128 + signal.SIGPIPE


def test_a_terminal_that_knows_no_unicode_shows_question_marks() -> None:
    program = [sys.executable, "-m", "megadiff.cli.main", "--help"]
    environment = os.environ | {"PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(program, env=environment, capture_output=True, check=True)
    assert b"usage: megadiff COMMAND ?" in done.stdout and not done.stderr
