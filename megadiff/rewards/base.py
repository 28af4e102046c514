"""What a reward is, and how `reward.<name>` in the config becomes one."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megadiff.config.schema import RewardConfig
from megadiff.process.doors import import_class, near
from megadiff.rewards import REWARDS
from megadiff.types import Prompt


@dataclass(frozen=True, kw_only=True)
class RewardSample:
    """What a reward sees of one sample. pixels: [F, H, W, 3] uint8 RGB, F = 1 for an image, shared: do not write to it.
    sample_index: its place in the prompt's group."""

    pixels: np.ndarray
    prompt: Prompt
    sample_index: int


class RewardError(RuntimeError):
    """A reward failed; the message names the reward, the prompt and the sample."""


class Reward:
    """Base of every reward. `reward.<name>.args` of the config are the keyword arguments of its constructor.

    One instance serves all worker threads, so score() must not change shared state (or guard it, see ocr.py).
    name: the config's `reward.<name>`, set by build_reward. samples_per_call: how many samples of a group one score()
    call gets; None is the whole group (cheap rewards, and judges that compare), a small number spreads slow work over
    the workers.
    """

    name: str = ""
    samples_per_call: int | None = None

    def score(self, samples: Sequence[RewardSample]) -> Sequence[float]:
        """One finite number per sample, higher is better; a list, a 1-D array or a 1-D tensor. May raise anything."""
        raise NotImplementedError(f"{type(self).__name__} does not define score(samples)")

    def validate(self, prompts: Sequence[Prompt]) -> None:
        """Called once before sampling with every prompt of the run; raises ValueError for one that cannot be scored."""

    def close(self) -> None:
        """Called once when the run ends; releases what the constructor or score() opened."""


def build_rewards(configs: Mapping[str, RewardConfig]) -> dict[str, Reward]:
    """The rewards of the config's `reward` section, in its order. ValueError as build_reward, or if there is none."""
    if not configs:
        raise ValueError(
            f"reward: 0 rewards are configured, need at least 1; set reward.<name>.type to one of {sorted(REWARDS)}"
        )
    return {name: build_reward(name, config) for name, config in configs.items()}


def build_reward(name: str, config: RewardConfig) -> Reward:
    """Build the reward `reward.<name>`.

    ValueError: unknown type, a path that leads to no Reward, wrong args, samples_per_call < 1.
    """
    reward_class = _resolve(name, config.type)
    _check_args(name, config.type, reward_class, config.args)
    try:
        reward = reward_class(**config.args)
    except (
        TypeError,
        ValueError,
    ) as error:  # a constructor refusing a value; say whose value it is
        raise ValueError(
            f"reward.{name}.args={dict(config.args)} refused by type={config.type}: {error}"
        ) from error
    reward.name = name
    count = reward.samples_per_call
    if count is not None and (type(count) is not int or count < 1):
        raise ValueError(
            f"reward.{name}: samples_per_call={count!r} of type={config.type} must be a whole "
            "number of at least 1, or None for the whole group in one call"
        )
    return reward


def _resolve(name: str, reward_type: str) -> type[Reward]:
    """The class that a table key or a `module:Class` path means."""
    path = reward_type if ":" in reward_type else REWARDS.get(reward_type)
    if path is None:
        raise ValueError(
            f"reward.{name}.type={reward_type} is unknown{near(reward_type, REWARDS)}; "
            f"known: {', '.join(sorted(REWARDS))}, or your own as my_package.my_module:MyReward"
        )
    return import_class(path, Reward, key=f"reward.{name}.type={reward_type}")


def _check_args(
    name: str, reward_type: str, reward_class: type[Reward], args: Mapping[str, object]
) -> None:
    """ValueError naming the argument that the constructor does not take or still needs."""
    try:
        inspect.signature(reward_class).bind(**args)
    except TypeError as error:
        known = list(inspect.signature(reward_class).parameters)
        unknown = [arg for arg in args if arg not in known]
        hint = near(unknown[0], known) if unknown else ""
        raise ValueError(
            f"reward.{name}.args (type={reward_type}): {error}{hint}; it takes: {', '.join(known) or 'no arguments'}"
        ) from error
