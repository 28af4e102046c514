"""Run one score() call, and say what became of it."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from megadiff.rewards.answers import WrongAnswer, samples_text, score_checked
from megadiff.rewards.base import Reward, RewardError, RewardSample


@dataclass(eq=False, kw_only=True)
class ScoreCall:
    """Make one score() call, on samples of group number `group` from index `first` on.

    may_fail: its samples may be left out. started_s: monotonic, infinity while it is queued.
    is_trial: of a grey picture, about which a judge may have nothing to say; an answer will do.
    seconds: it took. future: the values, NaN for a sample that could not be scored.
    overdue: the error of a call that took too long; what it answers later is not read.
    """

    reward: Reward
    weight: float
    may_fail: bool
    timeout_s: float
    samples: Sequence[RewardSample]
    group: int
    first: int
    started_s: float = math.inf
    seconds: float = 0.0
    future: Future[list[float]] = field(default_factory=Future)
    overdue: RewardError | None = None
    is_trial: bool = False

    def run(self) -> None:
        """Score, in a worker's thread. Never raises."""
        # reset() may have cancelled it while it was queued.
        if not self.future.set_running_or_notify_cancel():
            return
        self.started_s = time.monotonic()
        try:
            values = score_checked(self.reward, self.samples, weight=self.weight)
            if not (self.may_fail or self.is_trial):
                self._refuse_gaps(values)
        except BaseException as error:  # a worker that died here would leave the loop waiting
            self.future.set_exception(error)
        else:
            self.seconds = time.monotonic() - self.started_s
            self.future.set_result(values)

    @property
    def error(self) -> BaseException | None:
        """Return why it has no values, as far as it is known by now."""
        if self.overdue:
            return self.overdue
        return self.future.exception() if self.future.done() else None

    @property
    def is_fatal(self) -> bool:
        """Return True where its error ends the run."""
        error = self.error
        # a model with one thread is not asked by a second one beside a call that hangs
        is_stuck = self.overdue is not None and self.reward.workers == 1
        is_bug = isinstance(error, WrongAnswer)
        return error is not None and (not self.may_fail or is_bug or is_stuck)

    @property
    def is_over(self) -> bool:
        return self.overdue is not None or self.future.done()

    @property
    def num_failed(self) -> int:
        """Return how many of its samples have no score, as far as it is known by now."""
        if not self.is_over or (self.is_trial and not self.error):
            return 0
        return sum(map(math.isnan, self.values()))

    def values(self) -> list[float]:
        """Return the values of a call that is over; of one that failed NaN for every sample."""
        return [math.nan] * len(self.samples) if self.error else self.future.result()

    def remaining_s(self) -> float:
        """Return seconds until it is overdue, all of timeout_s while it is queued."""
        return min(self.timeout_s, self.started_s + self.timeout_s - time.monotonic())

    def give_up(self) -> None:
        """Count it as failed. It goes on in its thread until it ends by itself."""
        self.overdue = RewardError(
            f"reward {self.reward.name!r} on {samples_text(self.samples)} took longer than "
            f"timeout_s={self.timeout_s:g} in one call; raise reward.{self.reward.name}.timeout_s"
        )

    def _refuse_gaps(self, values: Sequence[float]) -> None:
        """Raise RewardError for a sample without a score."""
        gaps = [
            sample for sample, value in zip(self.samples, values, strict=True) if math.isnan(value)
        ]
        if gaps:
            name = self.reward.name
            raise RewardError(
                f"reward {name!r} could not score {samples_text(gaps)} (it answered None); "
                f"reward.{name}.on_failure=drop leaves such samples out of the update"
            )
