"""Notice replicas that hang: a stopped process, or an engine that makes no progress."""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from megadiff.rollout.client.client import ReplicaClient, ReplicaError
from megadiff.types import JsonObject

MAX_QUESTIONS = 32  # at the same time
LONGEST_INTERVAL_S = 15.0  # between two signs of life; below OWNER_SILENT_S of rollout.limits


class Pulse:
    """Ask replicas for their health now and then, in threads: a slow one delays no other.

    Each question is a sign of this run's life, too. A replica is hung when a question has stayed
    without an answer for heartbeat_s, whoever was asked again meanwhile, or when it says that its
    engine has had calls and made no progress for so long. Used from one thread.
    """

    def __init__(self, heartbeat_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        self._interval_s = min(LONGEST_INTERVAL_S, heartbeat_s / 4)
        self._pool = ThreadPoolExecutor(MAX_QUESTIONS, thread_name_prefix="pulse")
        self._running: dict[str, Future[JsonObject]] = {}
        self._asked_s: dict[str, float] = {}
        self._unanswered_s: dict[str, float] = {}  # when the first question was, since an answer
        self._silent_s: dict[str, float] = {}  # of engines

    def close(self) -> None:
        """Wait for nothing: what is still asked ends by its own deadline."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def ask(self, clients: Iterable[ReplicaClient]) -> None:
        """Ask those that have not been asked for a while, and read what has been answered.

        Others are forgotten: a replica that nobody asks is not silent.
        """
        now_s = time.monotonic()
        clients = list(clients)
        for name in self._asked_s.keys() - {client.name for client in clients}:
            self.forget(name)
        for client in clients:
            name = client.name
            is_due = now_s - self._asked_s.get(name, -self._interval_s) >= self._interval_s
            if is_due and name not in self._running:
                self._asked_s[name] = now_s
                self._unanswered_s.setdefault(name, now_s)
                self._running[name] = self._pool.submit(client.say_alive)
        self._read()

    def forget(self, name: str) -> None:
        """Begin anew with a replica: another process may have its name."""
        for table in (self._running, self._asked_s, self._unanswered_s, self._silent_s):
            table.pop(name, None)

    def hung(self, names: Iterable[str]) -> dict[str, str]:
        """Return those of the replicas that hang, with the reason."""
        now_s = time.monotonic()
        reasons = {}
        for name in names:
            unheard_s = now_s - self._unanswered_s.get(name, now_s)
            engine_s = self._silent_s.get(name, 0.0)
            limit = f"rollout.heartbeat_s={self._heartbeat_s:g}"
            if unheard_s > self._heartbeat_s:
                reasons[name] = f"it has not answered for {unheard_s:.0f} s, {limit}"
            elif engine_s > self._heartbeat_s:
                reasons[name] = f"its engine has made no progress for {engine_s:.0f} s, {limit}"
        return reasons

    def _read(self) -> None:
        for name, future in list(self._running.items()):
            if not future.done():
                continue
            del self._running[name]
            error = future.exception()
            if error is None:
                del self._unanswered_s[name]
                silent_s = future.result().get("engine_silent_s", 0.0)
                self._silent_s[name] = silent_s if isinstance(silent_s, float) else 0.0
            elif isinstance(error, ReplicaError) and error.status not in (None, 504):
                del self._unanswered_s[name]  # a refusal is an answer
