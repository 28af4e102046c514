"""Algorithms by name. Each is a row: what it trains on, whose velocities it needs, and its loss."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from megadiff.algorithms.awm import awm
from megadiff.algorithms.dpo import dpo
from megadiff.algorithms.flow_dppo import flow_dppo
from megadiff.algorithms.flow_grpo import flow_grpo
from megadiff.algorithms.flow_matching import flow_matching, weighted_matching
from megadiff.algorithms.grpo_guard import grpo_guard
from megadiff.algorithms.nft import nft
from megadiff.config.algorithm import AlgorithmConfig, clip_ranges, with_algorithm_defaults
from megadiff.types import LossOutput

# whose velocities a loss may ask for
OLD = "old"  # the policy before a step's first update
LAGGING = "lagging"  # the average that follows the policy by algorithm.lagging_decay
REFERENCE = "reference"  # the policy of step 0
ROW_KINDS = ("steps", "levels", "pairs")


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """Hold a loss and what it needs.

    loss: over StepInputs (rows "steps") or MatchInputs.
    rows: a key of train.rows.ROWS. "steps" are stored stochastic steps, "levels" clean latents at
    drawn noise levels, "pairs" the best and the worst of a group at the same levels.
    needs: whose velocities the inputs have. A step's first update has no "old": it is the policy.
    on_policy: it trains on samples and their rewards (train/loop.py), not on images (train/sft.py).
    samples_lagging: replicas draw with the lagging policy instead of the trained one.
    first_level: the first step of the schedule whose sigma may be drawn.
    sde_types: the rollout.sde_type that its loss is defined for; empty means all.
    """

    loss: Callable[..., LossOutput]
    rows: str = "steps"
    needs: frozenset[str] = frozenset()
    on_policy: bool = True
    samples_lagging: bool = False
    first_level: int = 0
    sde_types: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        # at the start and not after the first rollout
        if self.rows not in ROW_KINDS:
            raise ValueError(f"rows={self.rows!r} is not one of {', '.join(ROW_KINDS)}")
        unknown = sorted(self.needs - {OLD, LAGGING, REFERENCE})
        if unknown:
            raise ValueError(f"needs={unknown} is not among {OLD}, {LAGGING}, {REFERENCE}")

    @property
    def compares_rollout(self) -> bool:
        """Tell whether its ratio may be to log_probs that replicas have computed."""
        return self.rows == "steps" and OLD not in self.needs


def _constants(config: AlgorithmConfig, *names: str) -> dict[str, Any]:
    """Return constants of a loss that are called as their config keys are."""
    return {name: getattr(config, name) for name in ("adv_clip_max", "kl_coef", *names)}


def _needs(config: AlgorithmConfig, *names: str) -> frozenset[str]:
    """Return the names, with the reference where there is a KL to it."""
    return frozenset(names) | ({REFERENCE} if config.kl_coef else set())


def _flow_grpo(config: AlgorithmConfig) -> Algorithm:
    constants = _constants(config, "step_weight")
    loss = partial(flow_grpo, clip_range=clip_ranges(config), **constants)
    return Algorithm(loss=loss, needs=_needs(config))


def _grpo_guard(config: AlgorithmConfig) -> Algorithm:
    constants = _constants(config, "step_weight")
    loss = partial(grpo_guard, clip_range=clip_ranges(config), **constants)
    # Flow-CPS's log_prob is no density, so its ratio has no mean and spread to correct
    sde_types = frozenset({"flow_sde", "dance_sde"})
    return Algorithm(loss=loss, needs=_needs(config, OLD), sde_types=sde_types)


def _flow_dppo(config: AlgorithmConfig) -> Algorithm:
    loss = partial(flow_dppo, **_constants(config, "kl_limit", "step_weight"))
    return Algorithm(loss=loss, needs=_needs(config, OLD))


def _nft(config: AlgorithmConfig) -> Algorithm:
    old = LAGGING if config.lagging_decay else OLD
    loss = partial(nft, old=old, **_constants(config, "beta"))
    return Algorithm(
        loss=loss,
        rows="levels",
        needs=_needs(config, old),
        samples_lagging=old == LAGGING,
    )


def _awm(config: AlgorithmConfig) -> Algorithm:
    constants = _constants(config, "matching", "lagging_kl_coef")
    loss = partial(awm, clip_range=clip_ranges(config), **constants)
    lagging = {LAGGING} if config.lagging_kl_coef else set()
    # at sigma 1 a velocity says nothing about the sample
    return Algorithm(loss=loss, rows="levels", needs=_needs(config, OLD, *lagging), first_level=1)


def _rwr(config: AlgorithmConfig) -> Algorithm:
    loss = partial(weighted_matching, temperature=config.beta, **_constants(config))
    return Algorithm(loss=loss, rows="levels", needs=_needs(config))


def _dpo(config: AlgorithmConfig, *, on_policy: bool = True) -> Algorithm:
    loss = partial(dpo, beta=config.beta)
    return Algorithm(loss=loss, rows="pairs", needs=frozenset({REFERENCE}), on_policy=on_policy)


def _sft(config: AlgorithmConfig) -> Algorithm:
    return Algorithm(loss=flow_matching, rows="levels", on_policy=False)


ALGORITHMS: dict[str, Callable[[AlgorithmConfig], Algorithm]] = {
    "flow_grpo": _flow_grpo,
    "grpo_guard": _grpo_guard,
    "flow_dppo": _flow_dppo,
    "nft": _nft,
    "awm": _awm,
    "rwr": _rwr,
    "dpo": _dpo,
    "offline_dpo": partial(_dpo, on_policy=False),
    "sft": _sft,
}


def build_algorithm(config: AlgorithmConfig) -> Algorithm:
    """Build the algorithm that the config names: one of ALGORITHMS, or module:function.

    The function takes the AlgorithmConfig and returns an Algorithm. Raises ValueError for an
    unknown name, and where the function is missing or returns something else.
    """
    name = config.name
    if name in ALGORITHMS:
        return ALGORITHMS[name](with_algorithm_defaults(config))

    module_name, _, function_name = name.partition(":")
    if not function_name:
        raise ValueError(
            f"algorithm.name={name!r} is not one of {', '.join(ALGORITHMS)}; set one of them, or "
            "module:function of your own"
        )
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"algorithm.name={name!r}: {error}; give an importable module and a function in it"
        ) from error
    algorithm = function(with_algorithm_defaults(config))
    if not isinstance(algorithm, Algorithm):
        raise ValueError(
            f"algorithm.name={name!r} returned {type(algorithm).__name__}; "
            "return a megadiff.algorithms.Algorithm"
        )
    return algorithm
