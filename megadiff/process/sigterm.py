"""Let SIGTERM unwind a command, so that it leaves nothing half-done behind."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_CODE = 128 + signal.SIGTERM


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM leave the block by SystemExit, with EXIT_CODE. For the main thread."""
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _leave(*_: object) -> None:
    raise SystemExit(EXIT_CODE)
