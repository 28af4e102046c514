"""The commands' log and their way out."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
from typing import NoReturn

from megadiff.process.lifeline import kill_children


def log_to_stderr(rank: int = 0) -> None:
    """Log INFO of rank 0 and warnings of the others; stdout stays free for data."""
    logging.basicConfig(
        level=logging.INFO if rank == 0 else logging.WARNING,
        format="%(asctime)s %(levelname).1s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
    )
    for noisy in ("httpx", "httpcore"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def quiet_imports() -> None:
    """Silence notes of libraries at import that tell a user nothing, before they are imported.

    torchao lists kernels of other GPUs, diffusers asks it for a class that moved, and torch says
    how torchao should register its enums.
    """
    for noisy in ("torchao", "diffusers.quantizers.torchao", "torch.utils._pytree"):
        logging.getLogger(noisy).setLevel(logging.ERROR)


def show_crashes() -> None:
    """Show on stderr, at a crash below Python, what every thread was doing; also of children."""
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")
    faulthandler.enable()


def leave(code: int) -> NoReturn:
    """Exit at once with the children that are left; everything is closed by now."""
    # The interpreter's own way out would wait for threads whose requests hang. A child with a
    # session of its own, such as the browser that shows a report, was meant to stay.
    kill_children(session=os.getsid(0))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
