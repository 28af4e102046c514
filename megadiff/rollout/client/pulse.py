"""Notice replicas that hang: a stopped process, or an engine that makes no progress."""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from megadiff.rollout.client.client import ReplicaClient, ReplicaError
from megadiff.rollout.client.report import HUNG, Loss
from megadiff.types import JsonObject

MAX_QUESTIONS = 32  # at the same time
NO_ANSWERS = (None, 502, 503, 504)  # of nobody, or of a proxy that reaches nobody
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
        # all by address
        self._running: dict[str, Future[JsonObject]] = {}
        self._asked_s: dict[str, float] = {}
        self._unanswered_s: dict[str, float] = {}  # when the first question was, since an answer
        self._silent_s: dict[str, float] = {}  # of engines

    def close(self) -> None:
        """Wait for nothing: what is still asked ends by its own deadline."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def hung(self, clients: Iterable[ReplicaClient]) -> dict[str, Loss]:
        """Ask those that have not been asked for a while. Returns those that hang, by address.

        Others are forgotten: a replica that nobody asks is not silent.
        """
        now_s = time.monotonic()
        by_url = {client.url: client for client in clients}
        for table in (self._running, self._asked_s, self._unanswered_s, self._silent_s):
            for url in table.keys() - by_url.keys():
                del table[url]
        for url, client in by_url.items():
            is_due = now_s - self._asked_s.get(url, -self._interval_s) >= self._interval_s
            if is_due and url not in self._running:
                self._asked_s[url] = now_s
                self._unanswered_s.setdefault(url, now_s)
                self._running[url] = self._pool.submit(client.say_alive)
        self._read()
        return self._silent(by_url, now_s)

    def _silent(self, urls: Iterable[str], now_s: float) -> dict[str, Loss]:
        losses = {}
        for url in urls:
            unheard_s = now_s - self._unanswered_s.get(url, now_s)
            engine_s = self._silent_s.get(url, 0.0)
            limit = f"rollout.heartbeat_s={self._heartbeat_s:g}"
            if unheard_s > self._heartbeat_s:
                losses[url] = Loss(f"it has not answered for {unheard_s:.0f} s, {limit}", HUNG)
            elif engine_s > self._heartbeat_s:
                text = f"its engine has made no progress for {engine_s:.0f} s, {limit}"
                losses[url] = Loss(text, HUNG)
        return losses

    def _read(self) -> None:
        for url, future in list(self._running.items()):
            if not future.done():
                continue
            del self._running[url]
            error = future.exception()
            if error is None:
                del self._unanswered_s[url]
                silent_s = future.result().get("engine_silent_s", 0.0)
                self._silent_s[url] = silent_s if isinstance(silent_s, float) else 0.0
            elif isinstance(error, ReplicaError) and error.status not in NO_ANSWERS:
                del self._unanswered_s[url]  # a refusal is an answer
