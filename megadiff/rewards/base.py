"""Define rewards, and build them from `reward.<name>` in the config."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from megadiff.config.rewards import RewardConfig
from megadiff.process.doors import import_class, near
from megadiff.rewards import REWARDS
from megadiff.types import Prompt

HOW_TO_WRITE = "write class X(Reward) with score(self, samples), see docs/adding_a_reward.md"


@dataclass(frozen=True, kw_only=True)
class RewardSample:
    """Show a reward one sample.

    pixels: [F, H, W, 3] uint8 RGB, F = 1 for an image; shared, so do not write to them.
    sample_index: its index in the prompt's group.
    """

    pixels: np.ndarray
    prompt: Prompt
    sample_index: int


class RewardError(RuntimeError):
    """A reward failed; the message names the reward, the prompt and the sample."""


class ScoreFailed(Exception):
    """Raised by score() where asking again is useless, or was tried until the time was used up.

    `reward.<name>.on_failure` says what becomes of the call's samples. They never score 0.
    """


@dataclass(frozen=True, kw_only=True)
class RewardContext:
    """Tell a reward where it runs.

    device: of the rank that scores. judges: `judge.<name>` → base URLs of its servers on this node.
    """

    device: torch.device
    judges: Mapping[str, Sequence[str]] = field(default_factory=dict)


class Reward:
    """Base of every reward. `reward.<name>.args` in the config are its constructor's arguments.

    One instance serves all worker threads, so score() must not change shared state, or guard it as
    ocr.py does. The constructor runs on every rank, also with --dry-run: weights and connections
    belong into open().
    name: the config's `reward.<name>`, set by build_reward.
    samples_per_call: how many samples of a group a score() call gets. None is the whole group, for
    cheap rewards and judges that compare; a small number spreads slow work over the workers.
    workers: threads of its own, e.g. 32 for one that waits for a server, 1 for a model on a GPU.
    None shares the rank's threads, one for each core.
    deadline_s: within which score() gives up by itself, below `reward.<name>.timeout_s`.
    """

    name: str = ""
    samples_per_call: int | None = None
    workers: int | None = None
    deadline_s: float = 0.0

    def open(self, context: RewardContext) -> None:
        """Load weights, reach servers. Called once before the first score(), on ranks that score.

        May raise anything; the run then ends before its first step.
        """

    def sleep(self) -> None:
        """Give GPU memory back before training. No call runs meanwhile."""

    def wake(self) -> None:
        """Take the memory again, before the first score() after sleep()."""

    def score(self, samples: Sequence[RewardSample]) -> Sequence[float | None]:
        """Return one finite number per sample, higher is better, as a list, array or tensor.

        None: this sample could not be scored, and why is logged here. May raise anything.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define score(samples)")

    def figures(self) -> Mapping[str, float]:
        """Return what to log of the calls since the last figures(), e.g. {"retries": 2.0}.

        Logged as `reward/<name>/<key>`, the mean over the ranks that score.
        """
        return {}

    def validate(self, prompts: Sequence[Prompt]) -> None:
        """Raise ValueError for a prompt that cannot be scored.

        Called once before a run, with all of its prompts. `megadiff score` calls it with those of
        each request.
        """

    def close(self) -> None:
        """Release what the constructor or score() opened. Called once, when the run ends."""


def build_rewards(configs: Mapping[str, RewardConfig]) -> dict[str, Reward]:
    """Build the rewards of the config's `reward` section, in its order.

    Raises ValueError as build_reward does, and where there is none.
    """
    if not configs:
        raise ValueError(
            "reward: 0 rewards are configured, need at least 1; set reward.<name>.type to one of "
            f"{sorted(REWARDS)}"
        )
    return {name: build_reward(name, config) for name, config in configs.items()}


def build_reward(name: str, config: RewardConfig) -> Reward:
    """Build the reward `reward.<name>`.

    Raises ValueError for an unknown type, a class without score(), wrong args and samples_per_call
    < 1.
    """
    path = config.type if ":" in config.type else REWARDS.get(config.type)
    if path is None:
        raise ValueError(
            f"reward.{name}.type={config.type} is unknown{near(config.type, REWARDS)}; "
            f"known: {', '.join(sorted(REWARDS))}, or your own as my_package.my_module:MyReward"
        )

    key = f"reward.{name}.type={config.type}"
    reward_class = import_class(path, Reward, key=key, advice=f"; {HOW_TO_WRITE}")
    _check_args(name, config.type, reward_class, config.args)

    try:
        reward = reward_class(**config.args)
    except (TypeError, ValueError) as error:  # the constructor refuses a value; say whose it is
        raise ValueError(
            f"reward.{name}.args={dict(config.args)} refused by type={config.type}: {error}"
        ) from error

    reward.name = name
    # Of the object, which may have got its own in the constructor.
    if getattr(reward.score, "__func__", None) is Reward.score:
        raise ValueError(f"{key}: {path} does not define score(samples); {HOW_TO_WRITE}")
    count = reward.samples_per_call
    # Not isinstance: True would pass for 1.
    if count is not None and (type(count) is not int or count < 1):
        raise ValueError(
            f"reward.{name}: samples_per_call={count!r} of type={config.type} must be a whole "
            "number of at least 1, or None for the whole group in one call"
        )

    if reward.deadline_s >= config.timeout_s:
        raise ValueError(
            f"reward.{name}.args.deadline_s={reward.deadline_s:g} and "
            f"reward.{name}.timeout_s={config.timeout_s:g}: a call would be given up before its "
            "servers' failure is known; lower deadline_s or raise timeout_s"
        )
    return reward


def _check_args(
    name: str, reward_type: str, reward_class: type[Reward], args: Mapping[str, object]
) -> None:
    """Raise ValueError with the argument that the constructor does not take or still needs."""
    try:
        # Before it is called: a TypeError from within a constructor is another mistake.
        inspect.signature(reward_class).bind(**args)
    except TypeError as error:
        parameters = list(inspect.signature(reward_class).parameters)
        unknown = [arg for arg in args if arg not in parameters]
        hint = near(unknown[0], parameters) if unknown else ""
        raise ValueError(
            f"reward.{name}.args (type={reward_type}): {error}{hint}; "
            f"it takes: {', '.join(parameters) or 'no arguments'}"
        ) from error
