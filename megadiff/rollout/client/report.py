"""Name what takes reports of replicas, as megadiff.observe.events.Events.write() does."""

from __future__ import annotations

from typing import NamedTuple, Protocol

DIED = "replica_died"
HUNG = "replica_hung"


class Loss(NamedTuple):
    """Why a replica is of no more use. kind: of the event, DIED or HUNG."""

    reason: str
    kind: str = DIED


class Report(Protocol):
    """Write down what happened to a replica. kind: of megadiff.observe.events.KINDS."""

    def __call__(
        self, kind: str, *, replica: str = "", lost_s: float | None = None, text: str = ""
    ) -> None: ...


def no_report(kind: str, *, replica: str = "", lost_s: float | None = None, text: str = "") -> None:
    """Write nothing."""
