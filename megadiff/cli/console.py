"""The commands' log and their way out."""

from __future__ import annotations

import faulthandler
import logging
import os
import select
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from megadiff.process.lifeline import kill_children

INTERRUPTED = 128 + signal.SIGINT
READER_LEFT = 128 + signal.SIGPIPE  # as of programs that die of a `| head`


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


# Logger → beginnings of its notes that a user can do nothing about.
NOTES = {
    "transformers.configuration_utils": (
        "The argument `trust_remote_code` is to be used with Auto classes",
        # diffusers passes the old name on; its other versions know no other.
        "`torch_dtype` is deprecated",
    ),
    "transformers.modeling_utils": ("`torch_dtype` is deprecated",),
    "transformers.modeling_rope_utils": ("Missing validation function in ",),
}
WARNINGS = (  # their beginnings, as regular expressions
    "`torch_dtype` is deprecated and will be removed",
    # Nothing of ours changes a transformer's output in place, which this warns of.
    r"FSDP2-wrapped module \(\w+\) returned a view tensor",
)
SHOW_ALL = "MEGADIFF_SHOW_WARNINGS"


def _is_wanted(record: logging.LogRecord) -> bool:
    is_error = record.levelno >= logging.ERROR
    return is_error or not record.getMessage().startswith(NOTES[record.name])


def quiet_imports() -> None:
    """Silence what libraries say at start-up that tells a user nothing, before they are imported.

    torchao lists kernels of other GPUs, diffusers asks it for a class that moved, and torch says
    how torchao should register its enums. Errors stay. MEGADIFF_SHOW_WARNINGS=1 shows all.
    """
    if os.environ.get(SHOW_ALL):
        return
    for noisy in ("torchao", "diffusers.quantizers.torchao", "torch.utils._pytree"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    for name in NOTES:
        logging.getLogger(name).addFilter(_is_wanted)
    for text in WARNINGS:
        warnings.filterwarnings("ignore", message=text)


def show_crashes() -> None:
    """Show on stderr, at a crash below Python, what every thread was doing; also of children."""
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")
    faulthandler.enable()


def interrupted_text(command: str) -> str:
    """Return what a command says to Ctrl-C."""
    if os.environ.get("RANK", "0") != "0":
        return ""
    if command == "train":
        return "stopped by Ctrl-C before the first step; nothing was saved\n"
    return "interrupted\n"


@contextmanager
def ended_by_ctrl_c(command: str) -> Iterator[None]:
    """Let Ctrl-C end the process at once, with one line. For imports, which have begun nothing.

    An exception could be taken by a library for its own, or be dropped in a callback.
    """

    def end(*_: object) -> NoReturn:
        os.write(sys.stderr.fileno(), interrupted_text(command).encode())
        os._exit(INTERRUPTED)

    is_main = threading.current_thread() is threading.main_thread()
    # A shell lets commands in the background ignore it.
    if not is_main or signal.getsignal(signal.SIGINT) != signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def has_reader_left() -> bool:
    """Tell whether stdout is a pipe that nobody reads any more."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def leave(code: int) -> NoReturn:
    """Exit at once with the children that are left; everything is closed by now."""
    # The interpreter's own way out would wait for threads whose requests hang. A child with a
    # session of its own, such as the browser that shows a report, was meant to stay.
    kill_children(session=os.getsid(0))
    for stream in (sys.stdout, sys.stderr):
        if stream:
            with suppress(BrokenPipeError):
                stream.flush()
    os._exit(code)
