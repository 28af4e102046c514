"""Say when masters and moments may change. A rescue closes the gate and saves them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from megadiff.engines.stuck import freed_when_stuck

IDLE_S = 10.0  # for a step that is on when the gate closes


class GateEndedError(RuntimeError):
    """Say that a rescue saves the weights: they change no more in this process."""


class StepGate:
    """Count optimizer steps, and let a second thread hold them up.

    num_steps: optimizer steps of this process, of all components. It is the same on every rank
    between two steps, so it says whether the ranks hold parts of one policy.
    is_torn: a step or an exchange of weights broke off half-way; they are of no policy.
    has_ended: a rescue saves what there is, and nothing changes any more.

    The condition's lock is held for moments only. Whoever waits at the gate can be interrupted.
    """

    def __init__(self, device: torch.device) -> None:
        self.num_steps = 0
        self.is_torn = False
        self.has_ended = False
        self._device = device
        self._number = torch.zeros(1, device=device)  # to ask the GPU whether it copies
        self._limit: int | None = None
        self._is_busy = False  # with any change
        self._is_stepping = False
        self._condition = threading.Condition(threading.Lock())
        self._changed: torch.cuda.Event | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Enclose one optimizer step; waits while the gate is closed."""
        with self.change(is_step=True):
            yield
            self.num_steps += 1

    @contextmanager
    def change(
        self, *, is_step: bool = False, tears: bool = True, waits: bool = True
    ) -> Iterator[None]:
        """Enclose what moves or exchanges masters and moments.

        tears: whether they are of no use when it breaks off. waits: for good where a rescue has
        ended the gate; else raises GateEndedError there.
        """

        def may_begin() -> bool:
            if self.has_ended:
                return not waits
            is_held = is_step and self._limit is not None and self.num_steps >= self._limit
            return not self._is_busy and not is_held

        with self._condition:
            self._condition.wait_for(may_begin)
            self.check_open()
            self._is_busy = True
            self._is_stepping = is_step

        try:
            yield
        except BaseException:
            self.is_torn = self.is_torn or tears
            raise
        finally:
            if self._device.type == "cuda":
                # the change is still queued: a rescue's stream waits for it, and for no more
                self._changed = torch.cuda.Event()
                self._changed.record()
            with self._condition:
                self._is_busy = self._is_stepping = False
                self._condition.notify_all()

    def close(self, limit: int | None = None) -> int:
        """Let no step begin beyond `limit`, by default the present count. Returns the count.

        Other changes may go on: an exchange of 20 GB on the host takes some 20 s, and counts no
        step. Raises TimeoutError when a step that is on does not end.
        """
        with self._condition:
            self._limit = -1  # none may slip in while one that is on ends
            self._await(lambda: not self._is_stepping, IDLE_S)
            self._limit = self.num_steps if limit is None else limit
            self._condition.notify_all()
            return self.num_steps

    def open(self) -> None:
        """Let steps go on."""
        with self._condition:
            self._limit = None
            self._condition.notify_all()

    def end(self, timeout_s: float) -> None:
        """Hold up every change from now on. Raises TimeoutError when one that is on goes on."""
        with self._condition:
            self.has_ended = True
            self._condition.notify_all()  # to those that do not wait for good
            self._await(lambda: not self._is_busy, timeout_s)

    def check_open(self) -> None:
        """Raise GateEndedError where a rescue has ended the gate."""
        if self.has_ended:
            raise GateEndedError("a rescue has ended the gate")

    @contextmanager
    def after_changes(self) -> Iterator[None]:
        """Run GPU work on a stream of its own, after the changes that were asked for so far.

        The default stream may wait for a collective that another rank never joins. Where even this
        stream does not go on, the rank's collectives are aborted.
        """
        if self._device.type != "cuda":
            yield
            return
        with freed_when_stuck(self._number):
            torch.cuda.set_device(self._device)  # a thread begins on device 0
            stream = torch.cuda.Stream()
            if self._changed is not None:
                stream.wait_event(self._changed)
            with torch.cuda.stream(stream):
                yield
                stream.synchronize()

    def _await(self, is_over: Callable[[], bool], timeout_s: float) -> None:
        began = time.monotonic()
        if not self._condition.wait_for(is_over, timeout_s):
            seconds = time.monotonic() - began
            raise TimeoutError(f"weights were being changed for more than {seconds:.0f} s")
