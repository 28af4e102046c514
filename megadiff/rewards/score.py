"""Score while samples still arrive: submit groups, collect their rewards."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megadiff.config.schema import RewardConfig
from megadiff.process.workers import share_of_cores
from megadiff.rewards.answers import FLOAT32_MAX, samples_text, score_checked
from megadiff.rewards.base import Reward, RewardError, RewardSample, build_rewards
from megadiff.rewards.gil_watch import GRACE_S
from megadiff.rewards.workers import Workers
from megadiff.types import Prompt, RolloutGroup, Tensors

logger = logging.getLogger(__name__)

TOTAL = "total"  # the key of the weighted sum beside the rewards' own names
CLOSE_WAIT_S = 1.0  # for calls that still run when the scorer is closed
MAX_WORKERS = 16


@dataclass(eq=False, kw_only=True)
class _Call:
    """Make one score() call, on samples of group number `group` from index `first` on.

    started_s: monotonic, infinity while it is queued. future: (checked values, seconds).
    """

    reward: Reward
    weight: float
    samples: Sequence[RewardSample]
    group: int
    first: int
    started_s: float = math.inf
    future: Future[tuple[list[float], float]] = field(default_factory=Future)

    def run(self) -> None:
        # reset() may have cancelled it while it was queued.
        if not self.future.set_running_or_notify_cancel():
            return
        self.started_s = time.monotonic()
        try:
            values = score_checked(self.reward, self.samples, weight=self.weight)
        except BaseException as error:  # a worker that died here would leave the loop waiting
            self.future.set_exception(error)
        else:
            self.future.set_result((values, time.monotonic() - self.started_s))


class Scorer:
    """Score groups by every configured reward, in the background.

    Used from one thread; close() it at the end. Workers start with the first group.
    num_workers: threads; None for this rank's part of the node's cores, at most 16.
    timeout_s: limit of one score() call, from its start; for calls that keep the GIL see GilWatch.
    weights: reward name → weight in the total.
    reward_s: reward name → seconds in score() for the groups last collected, summed over workers.
    """

    def __init__(
        self,
        configs: Mapping[str, RewardConfig],
        *,
        num_workers: int | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        if TOTAL in configs:
            raise ValueError(
                f"reward.{TOTAL}: this name is taken by the weighted sum; rename the reward"
            )
        for name, config in configs.items():
            if not abs(config.weight) <= FLOAT32_MAX:
                raise ValueError(
                    f"reward.{name}.weight={config.weight}, must be finite in float32 "
                    f"(at most {FLOAT32_MAX:.2g}); 0 only watches the reward"
                )

        num_workers = share_of_cores(MAX_WORKERS) if num_workers is None else num_workers
        if num_workers < 1:
            raise ValueError(f"num_workers={num_workers}, must be at least 1")

        self.rewards = build_rewards(configs)
        self.weights = {name: float(config.weight) for name, config in configs.items()}
        self.timeout_s = timeout_s
        self.reward_s = dict.fromkeys(self.rewards, 0.0)

        self._num_workers = num_workers
        self._workers: Workers | None = None
        self._groups: list[list[RewardSample]] = []
        self._calls: list[_Call] = []

    def validate(self, prompts: Sequence[Prompt]) -> None:
        """Raise ValueError, with the reward's name, for a prompt that it cannot score."""
        for name, reward in self.rewards.items():
            try:
                reward.validate(prompts)
            except ValueError as error:
                raise ValueError(f"reward.{name}: {error}") from error

    def submit(self, group: RolloutGroup) -> None:
        """Start scoring the group and return at once.

        Raises RewardError if a group submitted earlier has failed meanwhile.
        """
        self._raise_first_failure()

        if self._workers is None:
            # Threads: numpy, Pillow, cv2 and onnxruntime release the GIL in their kernels. Two of
            # them read text 1.7 times as fast as one, exactly as two processes do, which would add
            # copies of all pixels.
            self._workers = Workers(self._num_workers, gil_limit_s=self.timeout_s + GRACE_S)

        samples = [
            RewardSample(pixels=pixels_FHWC, prompt=group.prompt, sample_index=index)
            for index, pixels_FHWC in zip(
                group.sample_indices, group.pixels_GFHWC.numpy(), strict=True
            )
        ]

        for name, reward in self.rewards.items():
            chunk = reward.samples_per_call or len(samples)
            for first in range(0, len(samples), chunk):
                call = _Call(
                    reward=reward,
                    weight=self.weights[name],
                    samples=samples[first : first + chunk],
                    group=len(self._groups),
                    first=first,
                )
                self._calls.append(call)
                self._workers.put(call.run)

        self._groups.append(samples)

    def collect(self) -> Tensors:
        """Wait for the groups submitted since the last collect(); the scorer is empty again.

        Returns reward name → [P, G] float32, groups in order of submission, and under "total" their
        sum weighted by `reward.<name>.weight`.
        Raises RewardError for the first call that failed or ran out of time; what was queued behind
        it is cancelled.
        """
        sizes = [len(samples) for samples in self._groups]
        assert len(set(sizes)) == 1, f"need groups of one size, got {sizes}"
        try:
            self._wait()
            return self._gather()
        finally:
            self.reset()

    def score(self, groups: Sequence[RolloutGroup]) -> Tensors:
        """Submit all groups and collect them."""
        for group in groups:
            self.submit(group)
        return self.collect()

    def reset(self) -> None:
        """Forget what was not collected. Queued calls never run; running ones end by themselves."""
        for call in self._calls:
            call.future.cancel()
        self._calls = []
        self._groups = []

    def close(self) -> None:
        """Stop the workers, with a second for running calls, and close the rewards.

        What a reward's close() raises is logged.
        """
        self.reset()
        if self._workers:
            self._workers.stop(CLOSE_WAIT_S)
        for name, reward in self.rewards.items():
            try:
                reward.close()
            except Exception:  # user code; the other rewards are closed all the same
                logger.exception("reward %r could not be closed", name)

    def _wait(self) -> None:
        """Wait for all calls. Raises RewardError for the first that failed or is overdue."""
        pending = {call.future for call in self._calls}
        while pending:
            self._raise_first_failure()  # its own text, and not that it took long
            oldest = min(
                (call for call in self._calls if call.future in pending),
                key=lambda call: call.started_s,
            )

            remaining_s = oldest.started_s + self.timeout_s - time.monotonic()
            if remaining_s <= 0:
                who = f"reward {oldest.reward.name!r} on {samples_text(oldest.samples)}"
                raise RewardError(
                    f"{who} took longer than timeout_s={self.timeout_s:g} in one call"
                )

            # A queued call cannot be overdue before timeout_s from now: nothing is missed.
            timeout_s = min(remaining_s, self.timeout_s)
            pending = wait(pending, timeout=timeout_s, return_when=FIRST_EXCEPTION).not_done

        self._raise_first_failure()

    def _raise_first_failure(self) -> None:
        """Raise the first failure, if there is one, and log the user's own traceback once."""
        for call in self._calls:
            error = call.future.exception() if call.future.done() else None
            if error is None:
                continue
            self.reset()
            if error.__cause__:
                logger.error("reward %r failed", call.reward.name, exc_info=error.__cause__)
            raise error

    def _gather(self) -> Tensors:
        shape = (len(self._groups), len(self._groups[0]))
        scores = {name: torch.zeros(shape, dtype=torch.float32) for name in self.rewards}
        self.reward_s = dict.fromkeys(self.rewards, 0.0)

        for call in self._calls:
            values, seconds = call.future.result()
            scores[call.reward.name][call.group, call.first : call.first + len(values)] = (
                torch.tensor(values)
            )
            self.reward_s[call.reward.name] += seconds

        total = torch.zeros(shape, dtype=torch.float32)
        for name, score in scores.items():
            total = total + self.weights[name] * score

        self._check_total(total, scores)
        scores[TOTAL] = total
        return scores

    def _check_total(self, total: Tensor, scores: Mapping[str, Tensor]) -> None:
        """Raise RewardError for a sum that float32 cannot hold, of values that it can."""
        wrong = (~total.isfinite()).nonzero().tolist()
        if not wrong:
            return

        group, index = wrong[0]
        sample = self._groups[group][index]
        terms = " + ".join(
            f"{self.weights[name]:g}·{score[group, index]:g} ({name})"
            for name, score in scores.items()
        )

        raise RewardError(
            f"the total reward on {samples_text([sample])} is {terms}, beyond float32's "
            f"{FLOAT32_MAX:.2g}; lower the rewards' weights"
        )
