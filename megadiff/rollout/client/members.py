"""Decide which replicas belong to a run, and when one that died is started again.

Pure state: seconds of a clock come in, no process and no connection is here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

FIRST_BACKOFF_S = 1.0  # doubled by each death in a row
LONGEST_BACKOFF_S = 60.0


class Phase(Enum):
    """Say where a replica is in its life.

    starting → ready → lost → ended → starting. Only a ready one is in the roster.
    ready: announced and proven. lost: dead, hung, or of no use; its process may still be there.
    ended: its process is gone for good, so its place may be taken. out: never again.
    """

    STARTING = auto()
    READY = auto()
    LOST = auto()
    ENDED = auto()
    OUT = auto()


@dataclass
class FleetMember:
    """A replica's place in the run.

    is_ours: this process starts it, and starts it again. since_s: when its phase began.
    life: counts how often it joined, as another process may have an address that it had before.
    lost_s: when it was lost last. due_s: not to be started, or taken back, before that.
    num_deaths: in a row, without a finished step in between. reason: of the last loss.
    """

    name: str
    is_ours: bool
    phase: Phase
    since_s: float
    url: str = ""
    life: int = 0
    lost_s: float = 0.0
    due_s: float = 0.0
    num_deaths: int = 0
    reason: str = ""


class Members:
    """Keep the replicas of a run, or of a node of it, by name.

    Those that this process starts are members from the beginning. Others join when they are found
    and leave when they say so.
    """

    def __init__(self, ours: Sequence[str] = (), *, max_restarts: int) -> None:
        """max_restarts: of one replica in a row, without a finished step in between."""
        self.max_restarts = max_restarts
        self._misfits: set[tuple[str, str]] = set()  # refused while another of the name was ready
        self.members = {
            name: FleetMember(name, is_ours=True, phase=Phase.STARTING, since_s=0.0)
            for name in ours
        }

    @property
    def roster(self) -> dict[str, str]:
        """Return the name and address of each replica that can serve."""
        return {member.name: member.url for member in self._in(Phase.READY)}

    @property
    def coming(self) -> list[str]:
        """Return the replicas of ours that start, or will be started again."""
        phases = (Phase.STARTING, Phase.LOST, Phase.ENDED)
        return [member.name for member in self._in(*phases) if member.is_ours]

    @property
    def starting(self) -> list[str]:
        """Return the replicas of ours whose processes run and are not ready yet."""
        return [member.name for member in self._in(Phase.STARTING)]

    def may_join(self, name: str, url: str, now_s: float) -> bool:
        """Tell whether a healthy replica of this name and address would change the roster."""
        member = self.members.get(name)
        if member is None:
            return True
        if (name, url) in self._misfits:
            return False
        if member.is_ours:
            return member.phase is Phase.STARTING
        if member.phase is Phase.ENDED:
            return now_s >= member.due_s
        return url != member.url  # another process by that name

    def join(self, name: str, url: str, now_s: float) -> None:
        """Take a replica that is healthy and proven into the roster."""
        assert self.may_join(name, url, now_s)
        member = self.members.setdefault(
            name, FleetMember(name, is_ours=False, phase=Phase.READY, since_s=now_s)
        )
        member.phase = Phase.READY
        member.url = url
        member.life += 1
        member.since_s = now_s

    def leave(self, name: str) -> None:
        """Forget a replica of others that ended of its own accord."""
        assert not self.members[name].is_ours
        del self.members[name]

    def lose(self, name: str, reason: str, now_s: float) -> bool:
        """Take a replica out of the roster. False where it is out already.

        One of others is ended at once: what its process does is its starter's to see to.
        """
        member = self.members.get(name)
        if member is None or member.phase not in (Phase.STARTING, Phase.READY):
            return False
        member.phase = Phase.LOST
        member.reason = reason
        member.since_s = now_s
        member.lost_s = now_s
        if not member.is_ours:
            self.end(name, now_s)
        return True

    def end(self, name: str, now_s: float) -> None:
        """Note that a lost replica's process is gone for good, or is nobody's here."""
        member = self.members[name]
        assert member.phase is Phase.LOST
        member.num_deaths += 1
        member.phase = Phase.ENDED
        if member.num_deaths > self.max_restarts:
            member.phase = Phase.OUT
        backoff_s = FIRST_BACKOFF_S * 2 ** (member.num_deaths - 1)
        member.due_s = now_s + min(backoff_s, LONGEST_BACKOFF_S)
        member.since_s = now_s

    def refuse(self, name: str, url: str, reason: str, now_s: float) -> None:
        """Keep a replica out, as long as it has this address.

        It takes nothing from a ready one of its name at another address.
        """
        member = self.members.setdefault(
            name, FleetMember(name, is_ours=False, phase=Phase.OUT, since_s=now_s)
        )
        if member.phase is Phase.READY and member.url != url:
            self._misfits.add((name, url))
            return
        member.phase = Phase.OUT
        member.url = url
        member.reason = reason

    def was_replaced(self, name: str) -> bool:
        """Tell whether a replica that was refused has announced itself by this name."""
        return any(name == misfit for misfit, _ in self._misfits)

    def due(self, now_s: float) -> list[str]:
        """Return the replicas of ours that are to be started now."""
        ended = [member for member in self._in(Phase.ENDED) if member.is_ours]
        return [member.name for member in ended if now_s >= member.due_s]

    def started(self, name: str, now_s: float) -> None:
        """Note that a process was started in an ended one's place. It keeps its old address."""
        member = self.members[name]
        assert member.is_ours and member.phase is Phase.ENDED
        member.phase = Phase.STARTING
        member.since_s = now_s

    def overdue(self, now_s: float, *, start_timeout_s: float) -> list[str]:
        """Return those that should have been ready by now."""
        return [
            member.name
            for member in self._in(Phase.STARTING)
            if now_s - member.since_s > start_timeout_s
        ]

    def lost(self) -> list[str]:
        """Return the replicas of ours whose processes have to be ended."""
        return [member.name for member in self._in(Phase.LOST)]

    def worked(self, replicas: Mapping[str, str]) -> None:
        """Note that these, name → address, drew a step and are well: earlier deaths do not count.

        One that died in the step and was started again meanwhile has another address.
        """
        for member in self._in(Phase.READY):
            if replicas.get(member.name) == member.url:
                member.num_deaths = 0

    def reasons(self) -> Mapping[str, str]:
        """Return what became of each replica that is not in the roster."""
        return {
            member.name: f"{member.phase.name.lower()}: {member.reason or 'no answer yet'}"
            for member in self.members.values()
            if member.phase is not Phase.READY
        }

    def _in(self, *phases: Phase) -> list[FleetMember]:
        return [member for member in self.members.values() if member.phase in phases]
