"""Let SIGTERM unwind a command, so that it leaves nothing half-done behind."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM leave the block by SystemExit, with a shell's code. For the main thread."""
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _leave(*_: object) -> None:
    raise SystemExit(128 + signal.SIGTERM)
