"""Step over a batch whose loss or gradient is not finite, or say whose rewards it had."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from megadiff.engines.engine import Engine
from megadiff.engines.sharded import NonFiniteError
from megadiff.parallel.collectives import gather_json
from megadiff.rewards.score import TOTAL
from megadiff.train.sampling import Rewards
from megadiff.types import Progress, RolloutGroup

logger = logging.getLogger(__name__)
SHOWN_PROMPTS = 3


def step_over(
    error: NonFiniteError,
    groups: Sequence[RolloutGroup],
    rewards: Rewards,
    *,
    engine: Engine,
    progress: Progress,
) -> None:
    """Count a batch with a gradient that is not finite. Collective: the error is on every rank.

    Raises NonFiniteError with the largest rewards' prompts when optim.skip_nonfinite are used up.
    """
    mesh = engine.mesh
    ranks = gather_json(_largest_rewards(groups, rewards), mesh.cpu_group)
    largest = sorted((row for rows in ranks for row in rows), reverse=True)[:SHOWN_PROMPTS]
    shown = "; ".join(dict.fromkeys(f"{text} {value:.4g}" for _, value, text in largest))
    limit = engine.config.optim.skip_nonfinite
    text = f"step {progress.step + 1}: {error}. Largest rewards: {shown}"

    if progress.skipped >= limit:
        raise NonFiniteError(
            f"{text}. optim.skip_nonfinite={limit} batches may be stepped over, {progress.skipped} "
            "were; look at these rewards, lower optim.lr, or raise it"
        ) from error

    progress.skipped += 1
    if mesh.rank == 0:
        logger.warning(
            "%s. Stepped over, %d of optim.skip_nonfinite=%d", text, progress.skipped, limit
        )


def _largest_rewards(
    groups: Sequence[RolloutGroup], rewards: Rewards
) -> list[tuple[float, float, str]]:
    """Return (magnitude, value, "reward 'name' of prompt 'text'") of this rank's largest."""
    rows = []
    for name in rewards.keys() - {TOTAL}:
        for group, values_G in zip(groups, rewards[name].double().nan_to_num(), strict=True):
            value = values_G[values_G.abs().argmax()].item()
            rows.append((abs(value), value, f"{name!r} of prompt {group.prompt.text[:60]!r}"))
    return sorted(rows, reverse=True)[:SHOWN_PROMPTS]
