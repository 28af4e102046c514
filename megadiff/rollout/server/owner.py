"""Say which run a replica works for. Pure state: seconds of a clock come in, Refused comes out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megadiff.rollout.limits import LOCKED, OWNER_SILENT_S
from megadiff.rollout.server.policy import Refused


class Owner:
    """Give the replica to the run whose push began last, until it gives it up or is silent.

    nobody → (begin) → owned → (release, or OWNER_SILENT_S without a sign of life) → free
    → (begin) → owned by another.
    The weights stay the owner's when it is gone: only its own generate is answered from them.
    A run is named by RUN_HEADER. "" is everybody without a name; they count as one run. None is the
    replica itself, which loads weights before it serves.
    clock: seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.run: str | None = None  # None: nobody has pushed, the weights are those on disk
        self._before: str | None = None  # whom the owner took the replica from
        self._since_s = 0.0
        self._heard_s = 0.0
        self._num_calls = 0
        self._released = False

    def check_begin(self, run: str | None) -> None:
        """Raise Refused(423) while the replica is another run's; waiting may help."""
        if self.is_taken(run):
            raise Refused(
                LOCKED,
                f"{_named(run)} cannot have this replica: {_named(self.run)} works with it, was "
                f"heard {self._silent_s():.0f} s ago and has {self._num_calls} calls in flight; "
                "give each run a registry of its own (rollout.registry), or begin when that run "
                f"has ended or was silent for {OWNER_SILENT_S:.0f} s",
            )

    def is_taken(self, run: str | None) -> bool:
        """Tell whether another run than this one works with the replica now."""
        # A call that takes long, such as a large batch, is no silence.
        is_silent = self._num_calls == 0 and self._silent_s() >= OWNER_SILENT_S
        return self._is_foreign(run) and not (self._released or is_silent)

    def take(self, run: str | None) -> None:
        """Make the run the owner; check_begin() has allowed it."""
        if run != self.run:
            self._before = self.run
            self._since_s = self._clock()
            self._num_calls = 0  # a call of the run before does not speak for this one
        self.run = run
        self._released = False  # a run that pushes again has taken back what it gave up
        self.hear(run)

    def check(self, run: str | None) -> None:
        """Raise Refused(409) for a bucket, a commit or a sleep of another run than the owner."""
        if self._is_foreign(run):
            lost = f", which took it from {_named(run)}" if run == self._before else ""
            raise Refused(
                409,
                f"this replica works for {_named(self.run)} since "
                f"{self._clock() - self._since_s:.0f} s{lost}, and holds its weights; "
                f"{_named(run)} has to push its own weights first, or needs replicas of its own "
                "(rollout.registry)",
            )

    def check_generate(self, run: str | None, asked_version: int | None) -> None:
        """Raise Refused(409) where the answer would come from another run's weights.

        Who asks for no version takes what is there, once the owner has given it up.
        """
        if asked_version is None and self._released:
            return
        self.check(run)

    def hear(self, run: str | None) -> None:
        """Note a sign of life. Another run than the owner's says nothing about the owner."""
        if run == self.run:
            self._heard_s = self._clock()

    @contextmanager
    def calling(self, run: str | None) -> Iterator[None]:
        """Count a call of the run as in flight; its failure is no sign of life."""
        is_owner = run == self.run
        since_s = self._since_s  # changes when another run takes the replica
        self.hear(run)
        self._num_calls += is_owner
        try:
            yield
            self.hear(run)
        finally:
            if is_owner and since_s == self._since_s:
                self._num_calls -= 1

    @property
    def silent_s(self) -> float | None:
        """Return how long nothing was heard of the owner, 0 during its calls; None without one."""
        if self.run is None or self._released:
            return None
        return 0.0 if self._num_calls else self._silent_s()

    def release(self, run: str | None) -> bool:
        """Give the replica up for the next run; False where the run does not own it."""
        if self.run is None or self._is_foreign(run):
            return False
        self._released = True
        return True

    def _is_foreign(self, run: str | None) -> bool:
        return self.run is not None and run != self.run

    def _silent_s(self) -> float:
        return self._clock() - self._heard_s


def _named(run: str | None) -> str:
    return f"run {run}" if run else "an unnamed run"
