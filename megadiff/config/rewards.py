"""Declare the config keys of rewards and of the judges that they ask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING

from megadiff.config.key import key


@dataclass
class RewardConfig:
    """Add a reward under a name of your choice. `reward.NAME: null` removes an earlier file's."""

    type: str = key(MISSING, "The reward is a built-in name or module:Class.")
    weight: float = key(1.0, "The sum counts this reward times this.")
    args: dict[str, Any] = key({}, "The reward's constructor gets these arguments.")
    only: dict[str, Any] = key(
        {}, "Only prompts whose columns have these values are scored, one value or a list for each."
    )
    on_failure: str = key(
        "stop",
        "A sample that cannot be scored ends the run (stop) or is left out of the update (drop).",
        choices=("stop", "drop"),
    )
    timeout_s: float = key(300.0, "A call of the reward may take this many seconds.", above=0)


@dataclass
class JudgeConfig:
    """Start servers of a vision-language model that rewards ask, on every node that scores."""

    model: str = key(MISSING, "The model is in this folder.")
    gpus: list[int] = key([], "The servers are on these GPUs of a node; none: on its CPU.")
    tp: int = key(1, "A server is spread over this many GPUs.", at_least=1)
    replicas: int = key(1, "A node has this many servers.", at_least=1)
    sleep: bool = key(False, "The servers give their GPU memory back while the policy trains.")
    args: dict[str, Any] = key(
        {}, "vLLM's server gets these options, e.g. {max-model-len: 4096}; true is a bare flag."
    )


# Mappings of a name to a section: the user chooses the names.
NAMED_SECTIONS: dict[str, type] = {"reward": RewardConfig, "judge": JudgeConfig}
