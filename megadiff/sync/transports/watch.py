"""End requests to replicas that give no sign of life, so that no push waits for a hung one."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Protocol

from megadiff.sync.transports.transfers import in_background

logger = logging.getLogger(__name__)
HEARTBEAT_S = 60.0
LONGEST_POLL_S = 1.0


class Living(Protocol):
    """A replica that can be asked whether it lives, beside the requests that it works on."""

    name: str

    def health(self) -> Mapping[str, Any]:
        """Return what it says of itself; raises within seconds where no answer comes."""
        ...

    def hang_up(self, reason: str) -> None:
        """Close its connections: requests that wait for an answer fail."""
        ...


class TargetWatch:
    """Ask targets that owe an answer for their health, and hang up on silent ones.

    A stopped process and a host that vanished keep their connections, so a request would wait for
    as long as it may take. A busy replica answers /health all the same.
    heartbeat_s: a target that has not answered for so long is hung. reasons: target → why its
    requests were ended.
    """

    def __init__(self, heartbeat_s: float = HEARTBEAT_S) -> None:
        self.heartbeat_s = heartbeat_s
        self.reasons: dict[str, str] = {}
        self._poll_s = min(LONGEST_POLL_S, heartbeat_s / 8)
        self._lock = threading.Lock()
        self._owed: dict[Future[Any], Living] = {}
        self._questions: dict[str, Future[Mapping[str, Any]]] = {}
        self._asked_s: dict[str, float] = {}
        self._heard_s: dict[str, float] = {}
        self._is_running = False

    def add(self, target: Living, future: Future[Any]) -> None:
        """Watch the target until the future is done. The watch's thread ends with the last one."""
        with self._lock:
            owing = [each.name for known, each in self._owed.items() if not known.done()]
            if target.name not in owing:
                self._heard_s[target.name] = time.monotonic()
                self.reasons.pop(target.name, None)
            self._owed[future] = target
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name="weights-watch", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(self._poll_s)
            with self._lock:
                self._owed = {
                    future: target for future, target in self._owed.items() if not future.done()
                }
                targets = {target.name: target for target in self._owed.values()}
                self._is_running = bool(targets)
            if not targets:
                return
            for target in targets.values():
                self._look_at(target)

    def _look_at(self, target: Living) -> None:
        name = target.name
        now_s = time.monotonic()

        question = self._questions.get(name)
        if question is not None and question.done():
            del self._questions[name]
            if question.exception() is None:
                self._heard_s[name] = now_s
            question = None
        # A quarter: one answer that is lost on its way is no silence.
        is_due = now_s - max(self._heard_s[name], self._asked_s.get(name, 0.0)) >= (
            self.heartbeat_s / 4
        )
        if question is None and is_due:
            self._asked_s[name] = now_s
            self._questions[name] = in_background(target.health)

        silent_s = now_s - self._heard_s[name]
        if silent_s > self.heartbeat_s and name not in self.reasons:
            reason = (
                f"gave no sign of life for {silent_s:.0f} s in a push "
                f"(limit {self.heartbeat_s:g} s)"
            )
            logger.warning("%s %s; its connections are closed", name, reason)
            self.reasons[name] = reason
            target.hang_up(reason)
