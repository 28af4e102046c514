"""Tell for how long a replica's engine has made no progress that it should have made."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megadiff.models.pipeline_stop import ALIVE_NAME

NEW_SHAPE_S = 900.0  # compiled, a first call has taken four minutes
MAX_SHAPES = 1000  # that are known: image requests come in any size and guidance


class EngineProgress:
    """Note what the engine is asked for, and whether it gets on. Used from one thread.

    alive: the file that a worker touches after each forward pass.
    """

    def __init__(self, private_folder: Path) -> None:
        self.alive = private_folder / ALIVE_NAME
        self._drawing: dict[object, tuple[Hashable, float]] = {}  # calls: shape, when they began
        self._shape_s: dict[Hashable, float] = {}  # seconds of the fastest answered call
        self._loading: dict[object, float] = {}  # calls with weights: when they began
        # The file's time of the last pass, and when it was first seen. Times are monotonic: the
        # clock of the day may jump.
        self._pass: tuple[int, float] = (0, 0.0)

    @contextmanager
    def drawing(self, shape: Hashable) -> Iterator[Callable[[], None]]:
        """Note a call for samples; yield what the caller calls once it has them.

        Calls of one shape take the same time. A failed call's time says nothing of theirs.
        """
        call = object()
        began_s = time.monotonic()
        self._drawing[call] = (shape, began_s)

        def note_samples() -> None:
            seconds = time.monotonic() - began_s
            before_s = self._shape_s.pop(shape, seconds)
            self._shape_s[shape] = min(seconds, before_s)  # as the last
            if len(self._shape_s) > MAX_SHAPES:
                del self._shape_s[next(iter(self._shape_s))]  # drawn longest ago

        try:
            yield note_samples
        finally:
            del self._drawing[call]

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Note a call with weights that waits for no slow disk, and for no replica for long."""
        call = object()
        self._loading[call] = time.monotonic()
        try:
            yield
        finally:
            del self._loading[call]

    def silent_s(self) -> float:
        """Return the seconds of silence, 0 where there is nothing to do.

        Passes tell of progress, so a whole call's seconds are its own, for texts and pixels.
        Nothing counts while a call has a shape that no call before it had: that may compile, for
        NEW_SHAPE_S at most. Of a call with weights nothing tells but its end.
        """
        loading_s = [time.monotonic() - began_s for began_s in self._loading.values()]
        return max(0.0, self._drawing_silent_s(), *loading_s)

    def _drawing_silent_s(self) -> float:
        now_s = time.monotonic()
        calls = self._drawing.values()
        may_compile = [
            began_s
            for shape, began_s in calls
            if shape not in self._shape_s and now_s - began_s < NEW_SHAPE_S
        ]
        if not calls or may_compile:
            return 0.0
        call_s = max(self._shape_s.get(shape, 0.0) for shape, _ in calls)
        since_s = min(began_s for _, began_s in calls)
        with suppress(OSError):  # not there before the first pass
            changed_ns = self.alive.stat().st_mtime_ns
            if changed_ns != self._pass[0]:
                self._pass = (changed_ns, now_s)
            since_s = max(since_s, self._pass[1])
        return now_s - since_s - call_s
