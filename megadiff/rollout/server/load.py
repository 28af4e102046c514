"""Count what a replica draws and what waits there. Pure state: seconds of a clock come in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Load:
    """Count the calls and samples of all runs and ranks, images of the OpenAI API among them.

    clock: seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.num_calls = 0  # waiting or in the engine
        self.num_samples = 0  # of these calls
        self.num_drawn = 0  # samples of calls that ended well; who answers a call counts them
        self.num_prepared = 0  # calls whose texts were encoded before their turn came
        self._busy_s = 0.0
        self._busy_since_s = 0.0
        self._ended_s = 0.0  # when the last call ended

    @contextmanager
    def drawing(self, num_samples: int) -> Iterator[None]:
        """Count a call as waiting or in the engine until the block ends."""
        if self.num_calls == 0:
            self._busy_since_s = self._clock()
        self.num_calls += 1
        self.num_samples += num_samples

        try:
            yield
        finally:
            self.num_calls -= 1
            self.num_samples -= num_samples
            self._ended_s = self._clock()
            if self.num_calls == 0:
                self._busy_s += self._clock() - self._busy_since_s

    @property
    def num_running(self) -> int:
        # An engine step runs one call (max_num_seqs=1); the others wait in the engine's queue.
        return min(1, self.num_calls)

    def waited_s(self, since_s: float) -> float:
        """Return how long a call waited that came at since_s, and is in the engine or just done."""
        # Calls are made one after another, in the order in which they came.
        return max(0.0, self._ended_s - since_s)

    @property
    def busy_s(self) -> float:
        """Return the seconds in which the engine had something to draw, the current call's too."""
        current_s = self._clock() - self._busy_since_s if self.num_calls else 0.0
        return self._busy_s + current_s
