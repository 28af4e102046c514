"""When masters and moments may change: a rescue closes the gate, and saves what is behind it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class StepGate:
    """Count optimizer steps and let a second thread hold them up.

    num_steps: optimizer steps of this process, of all components. It is the same on every rank
    between two steps, so it says whether the ranks hold parts of one policy.
    """

    def __init__(self, device: torch.device) -> None:
        self.num_steps = 0
        self._device = device
        self._limit: int | None = None
        self._lock = threading.RLock()
        self._opened = threading.Condition(self._lock)
        self._changed: torch.cuda.Event | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Enclose one optimizer step; waits while the gate is closed."""
        with self._lock:
            self._opened.wait_for(lambda: self._limit is None or self.num_steps < self._limit)
            yield
            self.num_steps += 1
            self._note_change()

    @contextmanager
    def change(self) -> Iterator[None]:
        """Enclose what moves or exchanges masters and moments but is no step."""
        with self._lock:
            yield
            self._note_change()

    def close(self, limit: int | None = None) -> int:
        """Let no step begin beyond `limit`, by default the present count. Returns the count."""
        with self._lock:
            self._limit = self.num_steps if limit is None else limit
            self._opened.notify_all()
            return self.num_steps

    def open(self) -> None:
        """Let steps go on."""
        with self._lock:
            self._limit = None
            self._opened.notify_all()

    def take(self, timeout_s: float) -> bool:
        """Hold up every change from now on; False where one did not end within timeout_s."""
        return self._lock.acquire(timeout=timeout_s)

    @contextmanager
    def after_changes(self) -> Iterator[None]:
        """Run GPU work on a stream of its own, after the changes that were asked for so far.

        The default stream may wait for a collective that another rank never joins.
        """
        if self._device.type != "cuda":
            yield
            return
        torch.cuda.set_device(self._device)
        stream = torch.cuda.Stream()
        if self._changed is not None:
            stream.wait_event(self._changed)
        with torch.cuda.stream(stream):
            yield
            stream.synchronize()

    def _note_change(self) -> None:
        if self._device.type == "cuda":
            self._changed = torch.cuda.Event()
            self._changed.record()
