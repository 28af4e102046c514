"""Score while samples still arrive: submit groups, collect their rewards."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait

import numpy as np
import torch
from torch import Tensor

from megadiff.config.rewards import RewardConfig
from megadiff.process.workers import share_of_cores
from megadiff.rewards.answers import FLOAT32_MAX, samples_text
from megadiff.rewards.base import Reward, RewardContext, RewardError, RewardSample, build_rewards
from megadiff.rewards.gil_watch import GRACE_S, GilWatch
from megadiff.rewards.names import check_name, own_figures
from megadiff.rewards.routes import applies, check_routes
from megadiff.rewards.score_call import ScoreCall
from megadiff.rewards.workers import Workers
from megadiff.types import Figures, Prompt, RolloutGroup, Tensors

logger = logging.getLogger(__name__)

TOTAL = "total"  # the key of the weighted sum beside the rewards' own names
# how a server is reached, which may be another one when a run goes on
SERVER_ARGS = ("url", "workers", "timeout_s", "deadline_s", "token_env")
CLOSE_WAIT_S = 1.0  # for calls that still run when the scorer is closed
MAX_WORKERS = 16  # that rewards share
DROP_LIMIT = 0.05  # of a step's samples of one reward; beyond it something is broken
ALONE_AGAIN = 10  # steps in which a reward's only call on this rank may fail once


class Scorer:
    """Score groups by every configured reward, in the background.

    Used from one thread; close() it at the end. A reward with `workers` has threads of its own, as
    waiting for a server takes no core; the others share some. They start with the first group.
    num_workers: of the shared threads; None for this rank's part of the node's cores, at most 16.
    weights: reward name → weight in the total.
    """

    def __init__(
        self, configs: Mapping[str, RewardConfig], *, num_workers: int | None = None
    ) -> None:
        for name in configs:
            check_name(name)
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

        self._configs = configs
        self._num_workers = num_workers
        self._workers: dict[str, Workers] = {}  # reward name → its own; "" → the shared ones
        self._watch: GilWatch | None = None
        self._is_open = False
        self._is_asleep = False
        self._trial_prompts: dict[str, Prompt] = {}
        self._groups: list[list[RewardSample]] = []
        self._calls: list[ScoreCall] = []
        self._seconds = dict.fromkeys(self.rewards, 0.0)
        self._num_dropped = dict.fromkeys(self.rewards, 0)
        self._num_collected = 0
        self._failed_alone: dict[str, int] = {}  # reward → when its only call failed last

    @property
    def identity(self) -> str:
        """Return as JSON what decides the scores and their sum."""
        rewards = {}
        for name, config in self._configs.items():
            args = {key: value for key, value in config.args.items() if key not in SERVER_ARGS}
            rewards[name] = [config.type, config.weight, args, config.only]
        return json.dumps(rewards, sort_keys=True, default=str)

    def validate(self, prompts: Sequence[Prompt]) -> None:
        """Raise ValueError, with the reward's name, for a prompt that it cannot score.

        Also for a prompt that none of them is asked about.
        """
        check_routes(self._configs, prompts)
        for name, reward in self.rewards.items():
            asked = [prompt for prompt in prompts if applies(self._configs[name], prompt)]
            self._trial_prompts |= {name: asked[0]} if asked else {}
            try:
                reward.validate(asked)
            except ValueError as error:
                raise ValueError(f"reward.{name}: {error}") from error

    def open(self, context: RewardContext) -> None:
        """Load the rewards' weights and reach their servers, on a rank that scores.

        Raises RewardError with the reward's name. The first group does it where nobody has.
        """
        self._tell_all("open", context)
        self._is_open = True

    def try_out(self, pixels_FHWC: np.ndarray) -> None:
        """Ask every reward about two copies of a picture, of a prompt that validate() has seen.

        So a wrong answer is told before the first rollout. Raises RewardError as collect() does.
        """
        self._get_ready()
        for name, prompt in self._trial_prompts.items():
            samples = [
                RewardSample(pixels=pixels_FHWC, prompt=prompt, sample_index=index)
                for index in range(2)
            ]
            self._put_calls(name, samples, is_trial=True)
        try:
            self._wait()
        finally:
            self.reset()

    def sleep(self) -> None:
        """Let the rewards give their GPU memory back. The next group wakes them."""
        if self._is_open and not self._is_asleep:
            self._tell_all("sleep")
            self._is_asleep = True

    def submit(self, group: RolloutGroup) -> None:
        """Start scoring the group and return at once.

        Raises RewardError if a group submitted earlier has failed meanwhile.
        """
        self._raise_first_failure()
        self._get_ready()

        samples = [
            RewardSample(pixels=pixels_FHWC, prompt=group.prompt, sample_index=index)
            for index, pixels_FHWC in zip(
                group.sample_indices, group.pixels_GFHWC.numpy(), strict=True
            )
        ]

        for name in self.rewards:
            if applies(self._configs[name], group.prompt):
                self._put_calls(name, samples)
        self._groups.append(samples)

    def collect(self) -> Tensors:
        """Wait for the groups submitted since the last collect(); the scorer is empty again.

        Returns reward name → [P, G] float32, groups in order of submission, and under "total" their
        sum weighted by `reward.<name>.weight`. NaN is the score of a sample that could not be
        scored, and of a group that the reward is not asked about. NaN is the total of a sample that
        has to be left out.
        Raises RewardError for the first call that failed or ran out of time, where on_failure is
        not drop, and where more than 5 % of a reward's samples on this rank failed; what was queued
        is cancelled.
        """
        self._num_collected += 1
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
        ended = [workers.stop(CLOSE_WAIT_S) for workers in self._workers.values()]
        if self._watch and all(ended):
            self._watch.close()
        for name, reward in self.rewards.items():
            try:
                reward.close()
            except Exception:  # user code; the other rewards are closed all the same
                logger.exception("reward %r could not be closed", name)

    def pop_figures(self) -> dict[str, Figures]:
        """Return reward name → what to log of the groups collected since the last call.

        seconds: in score(), summed over threads. dropped: samples without a score.
        Raises RewardError with the reward's name where its figures() fails, or gives no numbers.
        """
        figures = {}
        for name, reward in self.rewards.items():
            figures[name] = {
                "seconds": self._seconds[name],
                "dropped": float(self._num_dropped[name]),
                **own_figures(reward),
            }
        self._seconds = dict.fromkeys(self.rewards, 0.0)
        self._num_dropped = dict.fromkeys(self.rewards, 0)
        return figures

    def _put_calls(
        self, name: str, samples: Sequence[RewardSample], *, is_trial: bool = False
    ) -> None:
        """Queue a group's calls of one reward."""
        reward = self.rewards[name]
        config = self._configs[name]
        chunk = reward.samples_per_call or len(samples)
        for first in range(0, len(samples), chunk):
            call = ScoreCall(
                reward=reward,
                weight=self.weights[name],
                # what the loss does not use must not end the run
                may_fail=config.on_failure == "drop" or not config.weight,
                timeout_s=config.timeout_s,
                samples=samples[first : first + chunk],
                group=len(self._groups),
                first=first,
                is_trial=is_trial,
            )
            self._calls.append(call)
            self._workers_of(reward).put(call.run)

    def _workers_of(self, reward: Reward) -> Workers:
        return self._workers[reward.name if reward.workers else ""]

    def _tell_all(self, deed: str, *args: object) -> None:
        for name, reward in self.rewards.items():
            try:
                getattr(reward, deed)(*args)
            except Exception as error:  # user code may raise anything
                raise RewardError(f"reward {name!r} failed in {deed}(): {error}") from error

    def _get_ready(self) -> None:
        """Open or wake the rewards and start their threads."""
        if not self._is_open:
            self.open(RewardContext(device=torch.device("cpu")))
        if self._is_asleep:
            self._tell_all("wake")
            self._is_asleep = False
        if self._workers:
            return

        longest_s = max(config.timeout_s for config in self._configs.values())
        self._watch = GilWatch(longest_s + GRACE_S)
        # Threads: numpy, Pillow, cv2 and onnxruntime release the GIL in their kernels. Two of
        # them read text 1.7 times as fast as one, exactly as two processes do, which would add
        # copies of all pixels.
        sizes = {"": self._num_workers}
        sizes |= {name: reward.workers for name, reward in self.rewards.items() if reward.workers}
        for name, size in sizes.items():
            self._workers[name] = Workers(size, name=name or "shared", watch=self._watch)

    def _wait(self) -> None:
        """Wait for all calls. Raises RewardError for the first that ends the run."""
        pending = self._calls
        while pending := [call for call in pending if not call.is_over]:
            self._raise_failures()  # its own text, and not that it took long
            timeout_s = min(call.remaining_s() for call in pending)
            futures = [call.future for call in pending]
            wait(futures, timeout=max(timeout_s, 0.0), return_when=FIRST_EXCEPTION)

            for call in pending:
                if not call.future.done() and call.remaining_s() <= 0:
                    call.give_up()
                    self._workers_of(call.reward).add_thread()  # its own may never come back
        self._raise_failures(are_all_over=True)

    def _raise_failures(self, *, are_all_over: bool = False) -> None:
        """Raise what ends the run, too many failures included; warn of the others at the end."""
        self._raise_first_failure()
        for name in self.rewards:
            self._check_dropped(name, are_all_over=are_all_over)

    def _raise_first_failure(self) -> None:
        """Raise the first error that ends the run, and log the user's own traceback once.

        What may be left out is counted by _wait(), when all of the step's calls are known.
        """
        for call in self._calls:
            error = call.error
            if error is None or not call.is_fatal:
                continue
            self.reset()
            if error.__cause__:
                logger.error("reward %r failed", call.reward.name, exc_info=error.__cause__)
            raise error

    def _gather(self) -> Tensors:
        shape = (len(self._groups), len(self._groups[0]))
        scores = {name: torch.full(shape, math.nan) for name in self.rewards}
        total = torch.zeros(shape)

        for name, score_PG in scores.items():
            calls = [call for call in self._calls if call.reward.name == name]
            for call in calls:
                values = torch.tensor(call.values())
                score_PG[call.group, call.first : call.first + len(values)] = values
                self._seconds[name] += call.seconds
            self._num_dropped[name] += sum(call.num_failed for call in calls)
            if self.weights[name]:
                asked = sorted({call.group for call in calls})
                total[asked] += self.weights[name] * score_PG[asked]

        self._check_total(total, scores)
        return {**scores, TOTAL: total}

    def _check_dropped(self, name: str, *, are_all_over: bool) -> None:
        """Raise RewardError where so many of a reward's samples failed that it must be broken.

        Logs that some did, when all calls are over.
        """
        calls = [call for call in self._calls if call.reward.name == name]
        failed = [call for call in calls if call.num_failed]
        if not failed:
            return

        num_samples = sum(len(call.samples) for call in calls)
        num_failed = sum(call.num_failed for call in failed)
        reason = next((str(call.error) for call in failed if call.error), "it answered None")
        text = f"reward {name!r} failed on {num_failed} of {num_samples} samples: {reason}"

        # One call alone is no pattern, unless another one failed alone shortly before.
        limit = max(DROP_LIMIT * num_samples, *(len(call.samples) for call in calls))
        have_all = num_failed == num_samples
        before = self._failed_alone.get(name, -math.inf)
        is_again = calls[0].is_trial or self._num_collected - before < ALONE_AGAIN
        if self.weights[name] and (num_failed > limit or (have_all and is_again)):
            raise RewardError(
                f"{text}. on_failure=drop allows {DROP_LIMIT:.0%}, and one of {ALONE_AGAIN} steps' "
                "only calls"
            )
        if are_all_over:
            logger.warning("%s. They are left out", text)
            if have_all:
                self._failed_alone[name] = self._num_collected

    def _check_total(self, total: Tensor, scores: Mapping[str, Tensor]) -> None:
        """Raise RewardError for a sum that float32 cannot hold, of values that it can."""
        wrong = total.isinf().nonzero().tolist()
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
