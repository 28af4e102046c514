"""Ask other policies than the trained one for their velocities: old, lagging and reference."""

from __future__ import annotations

from dataclasses import replace

from megadiff.algorithms import LAGGING, OLD, REFERENCE, Algorithm
from megadiff.config.algorithm import AlgorithmConfig
from megadiff.engines.engine import Engine
from megadiff.engines.microbatch import Batch
from megadiff.train.rows import with_velocities
from megadiff.types import TrainBatch


def with_other_policies(engine: Engine, algorithm: Algorithm, batch: Batch) -> Batch:
    """Add the velocities of the reference and the lagging policy that a loss needs. Collective."""
    for name, policy in ((REFERENCE, engine.reference), (LAGGING, engine.lagging)):
        if name in algorithm.needs:
            with policy():
                batch = with_velocities(batch, name, engine.velocities(batch))
    return batch


def with_old_policy(engine: Engine, parts: list[Batch], *, weighs: bool) -> list[Batch]:
    """Return the parts with the engine's own policy as the old one. Collective.

    weighs: the replicas' log_probs, which are the old ones otherwise, weigh the policy gradient.
    """
    parts_with_old = []
    for index, part in enumerate(parts):
        # The first update trains the very policy that is asked for: its forwards answer themselves.
        # The others take one more forward in the microbatches of their update, to round alike.
        if index:
            part = with_velocities(part, OLD, engine.velocities(part))
        if isinstance(part, TrainBatch):
            replicas_NW = part.old_log_probs_NW if weighs else None
            part = replace(part, old_log_probs_NW=None, rollout_log_probs_NW=replicas_NW)
        parts_with_old.append(part)
    return parts_with_old


def follow(engine: Engine) -> None:
    """Let the lagging policy follow after a step's updates, where there is one."""
    settings = engine.config.algorithm
    if settings.lagging_decay:
        engine.follow(lagging_decay(settings, num_updates=engine.num_updates))


def lagging_decay(settings: AlgorithmConfig, *, num_updates: int) -> float:
    """Return by how much the lagging policy stays where it is after num_updates optimizer steps.

    It is 0 up to lagging_decay_start of them and then rises by lagging_decay_rate with each, up to
    lagging_decay. As in DiffusionNFT's decay types.
    num_updates: the engine's, as a resumed run may make more or fewer in a step than before.
    """
    risen = (num_updates - settings.lagging_decay_start) * settings.lagging_decay_rate
    return min(max(risen, 0.0), settings.lagging_decay)
