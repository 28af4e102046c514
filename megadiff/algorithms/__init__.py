"""Losses by name. Each declares what it needs of a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from megadiff.algorithms.flow_grpo import flow_grpo
from megadiff.config.schema import AlgorithmConfig
from megadiff.types import LossOutput, StepInputs


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """A loss over StepInputs. needs_reference: ref_mean_BLC must be there."""

    loss: Callable[[StepInputs], LossOutput]
    needs_reference: bool


def _flow_grpo(config: AlgorithmConfig) -> Algorithm:
    loss = partial(flow_grpo, clip_range=config.clip_range, adv_clip_max=config.adv_clip_max, kl_coef=config.kl_coef)
    return Algorithm(loss=loss, needs_reference=config.kl_coef > 0)


ALGORITHMS: dict[str, Callable[[AlgorithmConfig], Algorithm]] = {"flow_grpo": _flow_grpo}


def build_algorithm(config: AlgorithmConfig) -> Algorithm:
    """The algorithm that the config names. Raises ValueError for an unknown name."""
    if config.name not in ALGORITHMS:
        raise ValueError(f"algorithm.name={config.name!r} is not one of {sorted(ALGORITHMS)}")
    return ALGORITHMS[config.name](config)
