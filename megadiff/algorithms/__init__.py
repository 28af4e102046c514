"""Losses by name; each says what it needs of a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from megadiff.algorithms.flow_grpo import flow_grpo
from megadiff.algorithms.flow_matching import flow_matching
from megadiff.config.schema import AlgorithmConfig
from megadiff.types import LossOutput


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """Hold a loss and what it needs.

    loss: over StepInputs or FlowInputs. needs_reference: ref_mean_BLC must be there.
    on_policy: it trains on what replicas sample and rewards score (train/loop.py), not on given
    images (train/sft.py).
    """

    loss: Callable[..., LossOutput]
    needs_reference: bool = False
    on_policy: bool = True


def _flow_grpo(config: AlgorithmConfig) -> Algorithm:
    loss = partial(
        flow_grpo,
        clip_range=config.clip_range,
        adv_clip_max=config.adv_clip_max,
        kl_coef=config.kl_coef,
    )
    return Algorithm(loss=loss, needs_reference=config.kl_coef > 0)


def _sft(config: AlgorithmConfig) -> Algorithm:
    return Algorithm(loss=flow_matching, on_policy=False)


ALGORITHMS: dict[str, Callable[[AlgorithmConfig], Algorithm]] = {
    "flow_grpo": _flow_grpo,
    "sft": _sft,
}


def build_algorithm(config: AlgorithmConfig) -> Algorithm:
    """Build the algorithm that the config names. Raises ValueError for an unknown name."""
    if config.name not in ALGORITHMS:
        raise ValueError(f"algorithm.name={config.name!r} is not one of {sorted(ALGORITHMS)}")
    return ALGORITHMS[config.name](config)
