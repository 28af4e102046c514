"""Scoring while samples still arrive: submit groups, collect their rewards."""

from __future__ import annotations

import math
import numbers
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megadiff.config.schema import RewardConfig
from megadiff.parallel.workers import share_of_cores
from megadiff.rewards.base import Reward, RewardError, RewardSample, build_rewards
from megadiff.types import Prompt, RolloutGroup

TOTAL = "total"  # the key of the weighted sum beside the rewards' own names


@dataclass(eq=False, kw_only=True)
class _Call:
    """One score() call: samples of group number `group`, from place `first` in it. started_s: monotonic, None while
    it is queued. future: (checked values, seconds)."""

    reward: Reward
    samples: Sequence[RewardSample]
    group: int
    first: int
    started_s: float | None = None
    future: Future[tuple[list[float], float]] = field(default_factory=Future)

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        self.started_s = time.monotonic()
        try:
            values = score_checked(self.reward, self.samples)
        except RewardError as error:
            self.future.set_exception(error)
        else:
            self.future.set_result((values, time.monotonic() - self.started_s))


class Scorer:
    """Scores groups by every configured reward, in the background. Used from one thread; close() it at the end.

    Workers are threads: numpy, Pillow, cv2 and onnxruntime release the GIL in their kernels. Two threads on two cores
    read text 1.7 times as fast as one, exactly as two processes do, and processes would add copies of all pixels.
    They are daemons, unlike ThreadPoolExecutor's, so that a reward that hangs cannot keep the process alive.

    num_workers: threads; None takes this rank's share of the node's cores, at most 16. timeout_s: limit of one score()
    call, from its start. weights: reward name → weight in the total. reward_s: reward name → seconds spent in score()
    for the groups last collected, summed over workers.
    """

    def __init__(
        self, configs: Mapping[str, RewardConfig], *, num_workers: int | None = None, timeout_s: float = 300.0
    ) -> None:
        _check_names_and_weights(configs)
        num_workers = default_num_workers() if num_workers is None else num_workers
        if num_workers < 1:
            raise ValueError(f"num_workers={num_workers}, must be at least 1")
        self.rewards = build_rewards(configs)
        self.weights = {name: float(config.weight) for name, config in configs.items()}
        self.timeout_s = timeout_s
        self.reward_s = dict.fromkeys(self.rewards, 0.0)
        self._group_sizes: list[int] = []
        self._calls: list[_Call] = []
        self._queue: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=_work, args=(self._queue,), name=f"reward-{i}", daemon=True)
            for i in range(num_workers)
        ]
        for thread in self._threads:
            thread.start()

    def validate(self, prompts: Sequence[Prompt]) -> None:
        """Before any sampling: ValueError, with the reward's name, for a prompt that it cannot score."""
        for name, reward in self.rewards.items():
            try:
                reward.validate(prompts)
            except ValueError as error:
                raise ValueError(f"reward.{name}: {error}") from error

    def submit(self, group: RolloutGroup) -> None:
        """Starts scoring the group; returns at once. RewardError if a group submitted earlier has failed meanwhile."""
        self._raise_first_failure()
        samples = [
            RewardSample(pixels=each.pixels.numpy(), prompt=group.prompt, sample_index=each.sample_index)
            for each in group.trajectories
        ]
        for reward in self.rewards.values():
            chunk = reward.samples_per_call or len(samples)
            for first in range(0, len(samples), chunk):
                call = _Call(
                    reward=reward, samples=samples[first : first + chunk], group=len(self._group_sizes), first=first
                )
                self._calls.append(call)
                self._queue.put(call)
        self._group_sizes.append(len(samples))

    def collect(self) -> dict[str, Tensor]:
        """Waits for the groups submitted since the last collect().

        Returns reward name → [P, G] float32, groups in order of submission, and under "total" their sum weighted by
        `reward.<name>.weight`. RewardError for the first call that failed or ran out of time; what was queued behind
        it is cancelled, and the scorer is empty again.
        """
        assert len(set(self._group_sizes)) == 1, f"need groups of one size, got {self._group_sizes}"
        try:
            self._wait()
            return self._gather()
        finally:
            self.reset()

    def score(self, groups: Sequence[RolloutGroup]) -> dict[str, Tensor]:
        """submit() of all groups and collect()."""
        for group in groups:
            self.submit(group)
        return self.collect()

    def reset(self) -> None:
        """Forgets what was submitted and not collected: queued calls never run, results of running ones are dropped."""
        for call in self._calls:
            call.future.cancel()
        self._calls, self._group_sizes = [], []

    def close(self) -> None:
        """Stops the workers and closes the rewards. Waits at most a second for calls that are running."""
        self.reset()
        for _ in self._threads:
            self._queue.put(None)
        deadline_s = time.monotonic() + 1.0
        for thread in self._threads:
            thread.join(timeout=max(0.0, deadline_s - time.monotonic()))
        for reward in self.rewards.values():
            reward.close()

    def _wait(self) -> None:
        """Until all calls are done; RewardError for the first that failed or is overdue."""
        pending = {call.future for call in self._calls}
        while pending:
            now = time.monotonic()
            running = [call for call in self._calls if call.future in pending and call.started_s is not None]
            for call in running:
                if now - call.started_s >= self.timeout_s:
                    who = _who(call.reward, call.samples)
                    raise RewardError(f"{who} took longer than timeout_s={self.timeout_s:g} in one call")
            # A queued call cannot be overdue before timeout_s from now, so nothing is missed while waiting.
            remaining_s = min((call.started_s + self.timeout_s - now for call in running), default=self.timeout_s)
            pending = wait(pending, timeout=remaining_s, return_when=FIRST_EXCEPTION).not_done
            self._raise_first_failure()

    def _raise_first_failure(self) -> None:
        failed = [call for call in self._calls if call.future.done() and call.future.exception() is not None]
        if failed:
            self.reset()
            raise failed[0].future.exception()

    def _gather(self) -> dict[str, Tensor]:
        shape = (len(self._group_sizes), self._group_sizes[0])
        scores = {name: torch.zeros(shape, dtype=torch.float32) for name in self.rewards}
        self.reward_s = dict.fromkeys(self.rewards, 0.0)
        for call in self._calls:
            values, seconds = call.future.result()
            scores[call.reward.name][call.group, call.first : call.first + len(values)] = torch.tensor(values)
            self.reward_s[call.reward.name] += seconds
        scores[TOTAL] = sum(self.weights[name] * score for name, score in scores.items())
        return scores


def score_checked(reward: Reward, samples: Sequence[RewardSample]) -> list[float]:
    """reward.score(samples) as finite floats, one per sample. RewardError, naming reward, prompt and sample, if not."""
    try:
        values = reward.score(samples)
    except BaseException as error:  # user code: even a SystemExit must reach the loop, or the run waits for ever
        culprits = samples if len(samples) == 1 else _culprit(reward, samples)
        raise RewardError(f"{_who(reward, culprits)} raised {type(error).__name__}: {error}") from error
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != len(samples):
        count = f"{len(values)} values" if hasattr(values, "__len__") else f"a {type(values).__name__}"
        raise RewardError(
            f"{_who(reward, samples)} returned {count} for {len(samples)} samples; return a list of one number each"
        )
    return [_checked_value(reward, sample, value) for sample, value in zip(samples, values, strict=True)]


def _checked_value(reward: Reward, sample: RewardSample, value: object) -> float:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise RewardError(f"{_who(reward, [sample])} returned {value!r}; a reward must be a finite number")
    return float(value)


def _culprit(reward: Reward, samples: Sequence[RewardSample]) -> Sequence[RewardSample]:
    """The first sample that fails on its own, else all: one more pass, on the way out, for a message that helps."""
    for sample in samples:
        try:
            reward.score([sample])
        except BaseException:  # the same fault as score_checked's, which raises it
            return [sample]
    return samples


def _who(reward: Reward, samples: Sequence[RewardSample]) -> str:
    indices = ", ".join(str(sample.sample_index) for sample in samples)
    plural = "" if len(samples) == 1 else "s"
    return f"reward {reward.name!r} on sample{plural} {indices} of prompt {samples[0].prompt.text[:200]!r}"


def _work(calls: queue.SimpleQueue[_Call | None]) -> None:
    while (call := calls.get()) is not None:
        call.run()


def _check_names_and_weights(configs: Mapping[str, RewardConfig]) -> None:
    if TOTAL in configs:
        raise ValueError(f"reward.{TOTAL}: this name is taken by the weighted sum; rename the reward")
    for name, config in configs.items():
        if not math.isfinite(config.weight):
            raise ValueError(f"reward.{name}.weight={config.weight}, must be finite; 0 only watches the reward")


def default_num_workers() -> int:
    """This rank's share of the cores that the process may use, 1 to 16."""
    return share_of_cores(16)
