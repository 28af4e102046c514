"""Say which prompts a reward scores: `reward.<name>.only`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megadiff.config.rewards import RewardConfig
from megadiff.process.doors import near
from megadiff.types import Prompt


def applies(config: RewardConfig, prompt: Prompt) -> bool:
    """Return True where every column of `only` has its value, or one of its list."""
    for column, wanted in config.only.items():
        values = (
            wanted if isinstance(wanted, Sequence) and not isinstance(wanted, str) else [wanted]
        )
        if prompt.fields.get(column) not in values:
            return False
    return True


def check_routes(configs: Mapping[str, RewardConfig], prompts: Sequence[Prompt]) -> None:
    """Raise ValueError for a route that no prompt takes, and a prompt that no reward scores."""
    columns = {column for prompt in prompts for column in prompt.fields}
    for name, config in configs.items():
        for column in config.only:
            if prompts and column not in columns:
                raise ValueError(
                    f"reward.{name}.only={dict(config.only)}: none of {len(prompts)} prompts has "
                    f"the column {column!r}{near(column, sorted(columns))}; they have: "
                    f"{', '.join(sorted(columns)) or 'the text alone'}"
                )
        if prompts and not any(applies(config, prompt) for prompt in prompts):
            values = {repr(prompt.fields.get(key)) for prompt in prompts for key in config.only}
            raise ValueError(
                f"reward.{name}.only={dict(config.only)} applies to none of {len(prompts)} "
                f"prompts; their values are {', '.join(sorted(values)[:8])}"
            )

    # one that is only watched gives no prompt a reward
    scoring = [config for config in configs.values() if config.weight] or [*configs.values()]
    for prompt in prompts:
        if not any(applies(config, prompt) for config in scoring):
            asked = ", ".join(f"{name}: {dict(config.only)}" for name, config in configs.items())
            raise ValueError(
                f"no reward with a weight applies to prompt {prompt.text[:80]!r} with the columns "
                f"{dict(prompt.fields)}; reward.NAME.only is {asked}: add a reward for it, or "
                "remove the prompt"
            )
