"""End a process in which a reward never gives Python's lock (the GIL) back."""

from __future__ import annotations

import faulthandler
import threading
from collections.abc import Iterator
from contextlib import contextmanager

BEAT_S = 1.0
GRACE_S = 10.0  # by then the scorer has timed out, and named, a call that gave the GIL back
STDERR = 2  # the descriptor: sys.stderr may be something else, and the timer cannot ask Python


class GilWatch:
    """End the process when a call keeps the GIL for limit_s: no thread of Python runs to do so.

    The timer is faulthandler's, a thread of C: it writes what every Python thread was doing to
    stderr and ends the process with code 1. A thread of ours puts it off every second, as long as
    that gets the GIL. A process has one such timer; a program's own use of it is overridden.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._num_calls = 0
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._exit_if_the_gil_is_kept, name="gil-watch", daemon=True
        )
        self._thread.start()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Watch the GIL while the body runs."""
        with self._lock:
            self._num_calls += 1
            self._put_off()
        try:
            yield
        finally:
            with self._lock:
                self._num_calls -= 1
                if not self._num_calls:
                    faulthandler.cancel_dump_traceback_later()

    def close(self) -> None:
        """Stop the timer; calls that still run are not watched any more."""
        self._closing.set()
        self._thread.join(timeout=BEAT_S)
        faulthandler.cancel_dump_traceback_later()

    def _exit_if_the_gil_is_kept(self) -> None:  # a name that explains the traceback it stands in
        while not self._closing.wait(BEAT_S):
            with self._lock:
                if self._num_calls:
                    self._put_off()

    def _put_off(self) -> None:
        if not self._closing.is_set():
            faulthandler.dump_traceback_later(self._limit_s, exit=True, file=STDERR)
