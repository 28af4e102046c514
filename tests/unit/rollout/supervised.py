"""A supervisor over replicas that are a /health and no process."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from megadiff.rollout.client.client import ReplicaClient
from megadiff.rollout.client.members import Members
from megadiff.rollout.client.registry import RegistryWatch
from megadiff.rollout.client.supervisor import Supervisor
from megadiff.rollout.limits import RUN_HEADER
from megadiff.rollout.server.announcement import announced
from tests.unit.process.strangers import Stranger, reply


class Peer:
    """A replica's /health, announced, with a process that is none.

    is_silent: it answers nothing, as when it is stopped. is_stopped: what its process is said to
    be. num_questions: that it got. deeds: what was done with its process.
    """

    def __init__(self, registry: Path, name: str) -> None:
        self.name = name
        self.log = registry / f"{name}.log"
        self.is_silent = False
        self.is_taken_by = ""
        self.is_stopped = False
        self.num_questions = 0
        self.deeds: list[str] = []
        self.on_start: Callable[[], object] = lambda: None
        self._death = ""
        self._registry = registry
        self._stack = ExitStack()
        self._announcement = ExitStack()
        self.url = ""

    def serve(self) -> None:
        """Open an address, and announce it."""
        self._stack.close()
        self.url = self._stack.enter_context(Stranger(self._answer)).url
        self.announce()

    def announce(self) -> None:
        self._announcement.enter_context(announced(self._registry, name=self.name, url=self.url))

    def withdraw(self) -> None:
        self._announcement.close()

    def close(self) -> None:
        self.withdraw()
        self._stack.close()

    def die(self) -> None:
        """End as by SIGKILL: the announcement stays."""
        self._stack.close()
        self._death = f"{self.name} (pid 7) was killed by SIGKILL"

    def ending(self) -> str:
        return self._death

    def stopped_pid(self) -> int:
        return 7 if self.is_stopped else 0

    def kill(self) -> None:
        self.deeds.append("kill")
        self.is_stopped = False

    def start(self) -> None:
        self.deeds.append("start")
        self._death = ""
        self.is_silent = False
        self.on_start()

    def _answer(self, handler: Any, _: bytes) -> None:
        self.num_questions += 1
        if self.is_silent:
            time.sleep(2.5)
        run = handler.headers.get(RUN_HEADER)
        is_taken = self.is_taken_by not in ("", run)
        reply(handler, json.dumps({"name": self.name, "is_taken": is_taken}).encode())


@contextmanager
def peers(registry: Path, *names: str) -> Iterator[list[Peer]]:
    made = [Peer(registry, name) for name in names]
    for peer in made:
        peer.serve()
    try:
        yield made
    finally:
        for peer in made:
            peer.close()


@contextmanager
def supervised(
    registry: Path,
    *present: Peer | ReplicaClient,
    ours: bool = False,
    token: str | None = None,
    run: str = "mine",
    **options: Any,
) -> Iterator[tuple[Supervisor, list[str]]]:
    """Watch these; yields the kinds of events as well, each with its replica."""
    events: list[str] = []

    def report(
        kind: str, *, replica: str = "", lost_s: float | None = None, text: str = ""
    ) -> None:
        events.append(f"{kind} {replica}".strip())

    processes = {peer.name: peer for peer in present} if ours else {}
    members = Members(list(processes), max_restarts=options.pop("max_restarts", 3))
    for peer in present:
        members.join(peer.name, peer.url, time.monotonic())
    settings = {"heartbeat_s": 60.0, "start_timeout_s": 30.0, "min_replicas": 1} | options
    with Supervisor(
        registry=RegistryWatch(registry, token=token, run=run),
        members=members,
        make_client=lambda name, url: ReplicaClient(url, name, token=token, run=run),
        processes=processes,
        report=report,
        **settings,
    ) as supervisor:
        yield supervisor, events
