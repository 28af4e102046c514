"""Keep the replicas of a run alive: end those that hang, start them again, let others join.

One rank has a supervisor: of a node's colocated replicas the node's first one, of separate replicas
rank 0. What it decides reaches the other ranks between two pushes (megadiff/train/run_replicas.py).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from megadiff.rollout.client.client import RELEASE_TIMEOUT_S, ReplicaClient
from megadiff.rollout.client.fleet import Fleet
from megadiff.rollout.client.members import Members
from megadiff.rollout.client.processes import ReplicaDied, ReplicaProcess, log_end
from megadiff.rollout.client.pulse import Pulse
from megadiff.rollout.client.registry import PROGRESS_S, Address, RegistryWatch
from megadiff.rollout.client.report import DIED, HUNG, Loss, Report, no_report
from megadiff.types import JsonObject

logger = logging.getLogger(__name__)
TICK_S = 0.5
# Announcements that are read in a second, again and again. Of 480 each is read every 5 s.
READS_PER_S = 100
DYING_S = 1.0  # between a process's last connection and its end


@dataclass(eq=False, kw_only=True)
class Supervisor(AbstractContextManager["Supervisor"]):
    """Watch replicas in a thread; a context manager that ends the thread and frees the replicas.

    members: with the announced ones ready. make_client: name, url → a client of this run.
    fleet: this rank's, which learns of those that hang in its calls. processes: of the replicas
    that this rank starts. check: raises ValueError for an announcement of a replica that does not
    fit the run. min_replicas: a step begins when so many serve.
    restarts_any_time: False where replicas need the trainer's memory, so that they can start in
    roster() alone. releases: whether replicas outlive the run, and are told that it is over.
    """

    registry: RegistryWatch
    members: Members
    make_client: Callable[[str, str], ReplicaClient]
    heartbeat_s: float
    start_timeout_s: float
    min_replicas: int
    fleet: Fleet | None = None
    processes: Mapping[str, ReplicaProcess] = field(default_factory=dict)
    check: Callable[[JsonObject], None] = lambda announcement: None
    restarts_any_time: bool = True
    releases: bool = False
    report: Report = no_report

    def __post_init__(self) -> None:
        self._pulse = Pulse(self.heartbeat_s)
        self._clients: dict[str, ReplicaClient] = {}
        self._processes_seen: dict[Address, object] = {}  # what tells a process from the next
        self._stopped_s: dict[str, float] = {}  # replicas that are stopped → since when
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._looked_s = -math.inf  # at the registry
        self._sync_clients()
        self._thread = threading.Thread(target=self._watch, name="supervisor", daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join(TICK_S + 5.0)
        self._pulse.close()
        self.registry.close()
        if self.releases:
            self._release()
        for client in self._clients.values():
            client.close()

    def roster(
        self, lost: Mapping[str, Loss], lives: Mapping[str, int] | None = None
    ) -> dict[str, tuple[str, int]]:
        """Return the replicas to serve the next push: name → address, and which life it leads.

        lost: addresses that ranks found to be of no use. lives: name → the life they found there;
        one that began since then may be well. Waits until min_replicas serve, and until
        those have started that can do so here alone.
        Raises ReplicaDied, with the ends of their logs, when that cannot be any more.
        """
        with self._lock:
            for name, url in self.members.roster.items():
                life = self.members.members[name].life
                if url in lost and (lives or {}).get(name, life) == life:
                    # Why it broke is of more use than that its connection did.
                    ending = self._ending(name) if lost[url].kind == DIED else ""
                    self._lose(name, Loss(ending) if ending else lost[url])
        start_s = time.monotonic()
        said_s = start_s

        while True:
            with self._lock:
                self._tick(may_start=True)
                members = self.members.members
                roster = {
                    name: (url, members[name].life)
                    for name, url in sorted(self.members.roster.items())
                }
                coming = self.members.coming
                waits = bool(coming) and not self.restarts_any_time
                if len(roster) >= self.min_replicas and not waits:
                    break
                now_s = time.monotonic()
                text = self._waiting_text(len(roster), now_s - start_s)
                if now_s - start_s > self.start_timeout_s or (self.processes and not coming):
                    if len(roster) >= max(1, self.min_replicas):
                        break  # without those that did not come in time
                    logs = "\n".join(log_end(process.log) for process in self.processes.values())
                    raise ReplicaDied(f"{text}\n{logs}")
            if now_s - said_s > PROGRESS_S:
                said_s = now_s
                logger.warning("%s", text)
            time.sleep(TICK_S / 5)

        waited_s = time.monotonic() - start_s
        if waited_s > 1.0:
            self.report("waited_for_replicas", lost_s=waited_s, text=f"{len(roster)} serve")
        return roster

    def worked(self, replicas: Mapping[str, str]) -> None:
        """Note that these, name → address, drew a step and are well."""
        with self._lock:
            self.members.worked(replicas)

    def refuse(self, name: str, reason: str) -> None:
        """Keep a replica out of the run as long as it has this address."""
        with self._lock:
            member = self.members.members.get(name)
            if member is not None:  # else it has left meanwhile
                self._out(name, member.url, reason)

    def _watch(self) -> None:
        while not self._closed.wait(TICK_S):
            try:
                with self._lock:
                    self._tick(may_start=self.restarts_any_time)
            except Exception:  # a watch that ends would notice nothing any more
                logger.exception("the watch over the replicas failed, and goes on")

    def _tick(self, *, may_start: bool) -> None:
        """Look once at processes, heartbeats and registry, and act on what is found."""
        now_s = time.monotonic()
        for name, process in self.processes.items():
            ending = process.ending()
            if ending:
                self._lose(name, Loss(ending))

        self._lose_hung()
        self._lose_stopped(now_s)
        for name in self.members.overdue(now_s, start_timeout_s=self.start_timeout_s):
            timeout = f"rollout.start_timeout_s={self.start_timeout_s:g}"
            self._lose(name, Loss(f"it was not ready within {timeout}", HUNG))

        for name in self.members.lost():
            # Before its place is taken: a stopped one that woke up would serve an old policy.
            self.processes[name].kill()
            self.members.end(name, time.monotonic())
        if may_start:
            self._start_due()
        if self._is_look_due():
            self._looked_s = time.monotonic()
            self._look()

    def _lose_hung(self) -> None:
        """Lose those that hang: of the roster, and of the fleet's calls.

        One that has left the roster may have a last call.
        """
        called = self.fleet.called if self.fleet else []
        asked = {client.url: client for client in [*called, *self._clients.values()]}
        hung = self._pulse.hung(asked.values())
        for name, url in self.members.roster.items():
            if url in hung:
                self._lose(name, hung[url])
        if self.fleet:
            self.fleet.lose_hung(hung)

    def _lose_stopped(self, now_s: float) -> None:
        """Lose replicas that were stopped while they start: they have no /health to be silent."""
        before_s = self._stopped_s
        self._stopped_s = {}
        for name in self.members.starting:
            pid = self.processes[name].stopped_pid()
            if not pid:
                continue
            self._stopped_s[name] = before_s.get(name, now_s)
            stopped_s = now_s - self._stopped_s[name]
            if stopped_s > self.heartbeat_s:
                limit = f"rollout.heartbeat_s={self.heartbeat_s:g}"
                text = f"its process {pid} has been stopped for {stopped_s:.0f} s, {limit}"
                self._lose(name, Loss(text, HUNG))

    def _start_due(self) -> None:
        for name in self.members.due(time.monotonic()):
            member = self.members.members[name]
            self.processes[name].start()
            lost_s = time.monotonic() - member.lost_s
            self.members.started(name, time.monotonic())
            self.report("replica_restarted", replica=name, lost_s=lost_s)
            logger.warning(
                "%s is started again (%d of rollout.max_restarts=%d in a row)",
                name,
                member.num_deaths,
                self.members.max_restarts,
            )

    def _is_look_due(self) -> bool:
        """Say whether to read the registry at this tick; a small one is read at each."""
        pause_s = len(self.registry.claims) / READS_PER_S
        return pause_s <= TICK_S or time.monotonic() - self._looked_s >= pause_s

    def _look(self) -> None:
        """Take in who has announced itself, and let go who has left."""
        now_s = time.monotonic()
        roster = {Address(*item) for item in self.members.roster.items()}
        healthy = self.registry.look(settled=roster)
        self._lose_replaced(roster)
        for entry in healthy:
            name = entry["name"]
            url = entry["url"]
            if not self.members.may_join(name, url, now_s):
                continue
            try:
                self.check(entry)
            except ValueError as error:
                self._out(name, url, str(error))
                continue
            is_known = name in self.members.members
            self.members.join(name, url, now_s)
            self.report("replica_joined", replica=name, text=url)
            logger.info("%s %s", name, "serves again" if is_known else f"joins at {url}")

        claimed = self.registry.names()
        for name in self.members.roster.keys() - self.processes.keys() - claimed:
            if self.members.was_replaced(name):
                continue  # its announcement went with the misfit's; the pulse tells when it dies
            self.members.leave(name)
            self.report("replica_left", replica=name)
            logger.info("%s has left the run", name)
        self._sync_clients()

    def _lose_replaced(self, roster: Collection[Address]) -> None:
        """Lose replicas in whose place, at the same address, another process has begun."""
        seen = {
            claim.address: claim.entry.get("process")
            for claim in self.registry.claims
            if claim.address in roster
        }
        for address, process in seen.items():
            if self._processes_seen.get(address, process) != process:
                self._lose(address.name, Loss("another process has begun in its place"))
        self._processes_seen = seen

    def _lose(self, name: str, loss: Loss) -> None:
        reason, kind = loss
        if not self.members.lose(name, reason, time.monotonic()):
            return
        left = name not in self.processes and not self.registry.is_announced(name)
        if left:
            kind = "replica_left"
            self.members.leave(name)
        self.report(kind, replica=name, lost_s=0.0, text=reason)
        end = f"; {log_end(self.processes[name].log)}" if name in self.processes else ""
        logger.warning("%s %s: %s%s", name, "left" if left else "is lost", reason, end)
        self._sync_clients()

    def _out(self, name: str, url: str, reason: str) -> None:
        if name in self.processes:
            self.processes[name].kill()  # it would keep its memory, and nobody needs it any more
        self.members.refuse(name, url, reason, time.monotonic())
        self.report("replica_refused", replica=name, text=reason)
        logger.warning("%s is left out: %s", name, reason)
        self._sync_clients()

    def _sync_clients(self) -> None:
        """Keep a client of each replica in the roster, for its pulse."""
        roster = self.members.roster
        for name, client in list(self._clients.items()):
            if roster.get(name) != client.url:
                client.close()
                del self._clients[name]
        for name in roster.keys() - self._clients.keys():
            self._clients[name] = self.make_client(name, roster[name])

    def _waiting_text(self, count: int, waited_s: float) -> str:
        states = ", ".join(f"{name} ({text})" for name, text in self.members.reasons().items())
        return (
            f"{count} of rollout.min_replicas={self.min_replicas} replicas serve after "
            f"{waited_s:.0f} s, rollout.start_timeout_s={self.start_timeout_s:g}; "
            f"{states or 'none has announced itself'}{self.registry.left_out_text()}"
        )

    def _ending(self, name: str) -> str:
        """Return how a process of ours ended, or ends just now; '' where it lives on."""
        deadline_s = time.monotonic() + DYING_S
        while name in self.processes and time.monotonic() < deadline_s:
            ending = self.processes[name].ending()
            if ending:
                return ending
            time.sleep(TICK_S / 10)
        return ""

    def _release(self) -> None:
        """Free the replicas for another run; one that does not hear it misses this run in time."""
        clients = list(self._clients.values())
        pool = ThreadPoolExecutor(max_workers=max(1, len(clients)))
        futures = {pool.submit(client.release): client for client in clients}
        wait(futures, timeout=RELEASE_TIMEOUT_S)
        pool.shutdown(wait=False, cancel_futures=True)
        for future, client in futures.items():
            if future.cancelled() or not future.done() or future.exception():
                logger.debug("%s did not hear that the run is over", client.name)
