"""Measure seconds per named stage, around the work."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from megadiff.observe.metrics import stage_key


class Timers:
    """Add up host seconds by name until they are popped.

    Timers of different names nest; the outer one includes the inner. Device work in flight is not
    waited for: a stage that ends in a collective or a copy to the host is measured truly, one
    that only queues kernels is not. Used from one thread; another may read `running`.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        # Names; replaced as a whole, as another thread may look at it.
        self.running: frozenset[str] = frozenset()
        # Entered around each stage by who traces a step; observe/profile.py sets it.
        self.mark: Callable[[str], AbstractContextManager[Any]] | None = None

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the block, also when it raises. Raises ValueError when `name` is already running."""
        if name in self.running:
            raise ValueError(
                f"timer {name!r} is already running and would count twice; give the inner one its "
                "own name"
            )

        self.running |= {name}
        # Steady, unlike time.time(), which an NTP correction moves.
        start_s = time.perf_counter()

        try:
            with self.mark(name) if self.mark else nullcontext():
                yield
        finally:
            self.running -= {name}
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start_s

    def take_over(self, other: Timers) -> float:
        """Add the seconds of another thread's timers, none of which runs; return their sum."""
        seconds = other._seconds
        other._seconds = {}
        for name, value in seconds.items():
            self._seconds[name] = self._seconds.get(name, 0.0) + value
        return sum(seconds.values())

    def pop(self) -> dict[str, float]:
        """Return time/<name>_s → seconds since the last pop, without timers that still run."""
        seconds = self._seconds
        self._seconds = {}
        return {stage_key(name): value for name, value in seconds.items()}
