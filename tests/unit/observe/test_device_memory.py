"""The peaks of each phase, from a source that the test controls."""

import threading
import time

from megadiff.observe.device_memory import GIB, DeviceMemory
from megadiff.observe.timers import Timers


class Used:
    """Bytes in use; `seen()` waits until they were asked for twice more, so that one question lay
    within the wait.
    """

    def __init__(self) -> None:
        self.gib, self.asked = 1.0, threading.Semaphore(0)

    def __call__(self) -> int:
        self.asked.release()
        return int(self.gib * GIB)

    def seen(self, gib: float) -> None:
        self.gib = gib
        while self.asked.acquire(blocking=False):
            continue
        for _ in range(3):
            assert self.asked.acquire(timeout=10)


def test_each_phase_has_its_own_peak():
    timers, used = Timers(), Used()
    with DeviceMemory(timers, used, period_s=0.001) as memory:
        with timers("step"):
            with timers("rollout"):
                for gib in (3.0, 7.0, 2.0):
                    used.seen(gib)
            used.seen(9.0)  # in no phase
            with timers("train"):
                used.seen(5.0)
        expected = {
            "memory/parity_gib": 0,
            "memory/sync_gib": 0,
            "memory/rollout_gib": 7,
            "memory/train_gib": 5,
        }
        assert memory.pop() == expected
        with timers("rollout"):
            used.seen(1.0)
        assert memory.pop() == dict.fromkeys(expected, 0) | {"memory/rollout_gib": 1}


def test_nothing_is_asked_when_it_is_over():
    asked = []
    with DeviceMemory(Timers(), lambda: asked.append(1) or 0, period_s=0.001):
        while not asked:
            time.sleep(0.001)
    count = len(asked)
    time.sleep(0.02)
    assert len(asked) == count and "device_memory" not in {
        thread.name for thread in threading.enumerate()
    }
