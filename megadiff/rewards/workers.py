"""Run calls of rewards in threads that neither outlive the process nor abort it."""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence

from megadiff.rewards.gil_watch import STDERR, GilWatch

logger = logging.getLogger(__name__)

EXIT_WAIT_S = 5.0  # for calls that still run when Python ends


class Workers:
    """Threads that take calls from one queue, in order.

    They are daemons, unlike ThreadPoolExecutor's, so that a reward that hangs cannot keep the
    process alive. None of them is inside torch or onnxruntime when Python ends: see _stop_at_exit.

    name: of the threads. watch: over calls that keep the GIL; a process has one.
    """

    def __init__(self, num_workers: int, *, name: str, watch: GilWatch) -> None:
        self._stopping = False
        self._watch = watch
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._name = name
        self._threads: list[threading.Thread] = []

        atexit.register(self._stop_at_exit)
        for _ in range(num_workers):
            self.add_thread()

    def put(self, call: Callable[[], None]) -> None:
        """Run the call as soon as a thread is free. It must not raise."""
        self._queue.put(call)

    def add_thread(self) -> None:
        """Start one more, e.g. for one that is lost to a call that hangs."""
        name = f"reward-{self._name}-{len(self._threads)}"
        thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def stop(self, wait_s: float) -> bool:
        """Wait half of the time for running calls, then interrupt them. Return whether all ended.

        A call is interrupted where it next runs Python. Queued calls never run.
        """
        self._stopping = True
        # Wakes the threads that wait for a call.
        for _ in self._threads:
            self._queue.put(None)
        _join(self._threads, wait_s / 2)

        # Interrupted last: a call that ends by itself can give back what it holds.
        alive = [thread for thread in self._threads if thread.is_alive()]
        for thread in alive:
            _interrupt(thread)
        _join(alive, wait_s / 2)

        ended = not any(thread.is_alive() for thread in alive)
        if ended:
            atexit.unregister(self._stop_at_exit)
        return ended

    def _work(self) -> None:
        while (call := self._queue.get()) is not None and not self._stopping:
            with self._watch.call():
                call()

    def _stop_at_exit(self) -> None:
        """Leave no thread to the end of Python, which kills daemons when they next want the GIL.

        Inside C++, such as torch's, the kill is an abort. A call that cannot be stopped thus ends
        the process here, with code 1: Python 3.11 tells nobody the code that it would end with.
        """
        if self.stop(EXIT_WAIT_S):
            return
        logger.error("a reward's call does not end; its traceback follows, and exit code 1")
        logging.shutdown()
        faulthandler.dump_traceback(file=STDERR)
        os._exit(1)


def _join(threads: Sequence[threading.Thread], wait_s: float) -> None:
    deadline_s = time.monotonic() + wait_s
    for thread in threads:
        thread.join(timeout=max(0.0, deadline_s - time.monotonic()))


def _interrupt(thread: threading.Thread) -> None:
    """Raise SystemExit in the thread when it next runs Python, so never within a kernel."""
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)
    )
