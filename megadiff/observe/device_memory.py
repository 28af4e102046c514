"""Watch a GPU's used memory and keep its peak in every phase of a step."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from megadiff.observe.timers import Timers

logger = logging.getLogger(__name__)

PHASES = ("parity", "sync", "rollout", "train")  # timers' names
PERIOD_S = 0.05
GIB = 2**30


def phase_key(phase: str) -> str:
    """Return the metric key of a phase's peak: rollout → memory/rollout_gib."""
    return f"memory/{phase}_gib"


class DeviceMemory:
    """Ask every period_s, in a daemon thread, how much is used; keep the most for each of PHASES.

    Allocators keep what they took, so a peak lasts; a phase shorter than a period may go unseen.
    used_bytes: of the device, by all processes and their CUDA contexts. Called in the thread.
    """

    def __init__(
        self, timers: Timers, used_bytes: Callable[[], int], *, period_s: float = PERIOD_S
    ) -> None:
        self._timers = timers
        self._used_bytes = used_bytes
        self._period_s = period_s
        self._peaks: dict[str, int] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="device_memory", daemon=True)

    def __enter__(self) -> DeviceMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(timeout=1.0)  # a device that does not answer keeps no process alive

    def pop(self) -> dict[str, float]:
        """Return memory/<phase>_gib → the peak since the last pop; 0 for a phase not seen."""
        with self._lock:
            peaks = self._peaks
            self._peaks = {}
        return {phase_key(phase): peaks.get(phase, 0) / GIB for phase in PHASES}

    def _watch(self) -> None:
        while not self._ended.wait(self._period_s):
            # Asking the device takes a while, in which a phase may end.
            before = self._timers.running
            try:
                used = self._used_bytes()
            except RuntimeError as error:  # a device that has failed says so where it works, too
                logger.warning("no more figures of the device's memory: %s", error)
                return

            with self._lock:
                # A phase that ended or began meanwhile may not be the one that was measured.
                for phase in before & self._timers.running & set(PHASES):
                    self._peaks[phase] = max(used, self._peaks.get(phase, 0))
