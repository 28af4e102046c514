"""What the commands share: their log and their way out."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
from typing import NoReturn

from megadiff.process.lifeline import kill_children


def log_to_stderr(rank: int = 0) -> None:
    """INFO of rank 0, warnings of the others; stdout stays free for data."""
    logging.basicConfig(
        level=logging.INFO if rank == 0 else logging.WARNING,
        format="%(asctime)s %(levelname).1s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
    )
    for noisy in ("httpx", "httpcore"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def show_crashes() -> None:
    """A crash below Python (SIGSEGV, SIGABRT …) shows on stderr what every thread was doing; of child processes as well."""
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")
    faulthandler.enable()


def leave(code: int) -> NoReturn:
    """Exit at once: everything is closed by now, and interpreter shutdown would wait for threads whose requests hang.

    Child processes that are left, such as a reward's, end with this one. Those that got a session
    of their own, such as the browser that shows a report, were meant to stay.
    """
    kill_children(session=os.getsid(0))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
