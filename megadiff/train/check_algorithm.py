"""Refuse settings that contradict the algorithm. Each error gives both numbers and the fix."""

from __future__ import annotations

import math
from functools import partial
from operator import attrgetter

from megadiff.algorithms import ALGORITHMS, LAGGING, Algorithm
from megadiff.config.algorithm import AlgorithmConfig, with_algorithm_defaults
from megadiff.config.load import ConfigError
from megadiff.config.schema import Config
from megadiff.data.stores import IMAGES, PAIRS

# what a supervised algorithm's rows are made of
ITEMS = {"levels": IMAGES, "pairs": PAIRS}
# algorithm.<key> → the arguments by which a built-in loss takes it
CONSTANTS = {
    "clip_range": {"clip_range"},
    "clip_range_high": {"clip_range"},
    "adv_clip_max": {"adv_clip_max"},
    "kl_limit": {"kl_limit"},
    "beta": {"beta", "temperature"},
    "matching": {"matching"},
}
# rwr weighs a sample by exp of at most this. The gradient norm squares the weight: exp(60) leaves
# float32 a factor of 1e12 for the gradient itself.
MAX_EXPONENT = 30


def check_algorithm(config: Config, algorithm: Algorithm) -> None:
    """Raises ConfigError for the first setting that the algorithm cannot use."""
    if not algorithm.on_policy:
        _check_supervised(config, algorithm)
    elif algorithm.rows == "steps":
        _check_steps(config, algorithm)
    else:
        _check_levels(config, algorithm)

    settings = config.algorithm
    name = f"algorithm.name={settings.name}"
    # the table gives a loss its constants by name; somebody's own may take them as anything
    loss = algorithm.loss if settings.name in ALGORITHMS else None
    for key in ("kl_coef", "lagging_kl_coef"):
        value = getattr(settings, key)
        if value and isinstance(loss, partial) and key not in loss.keywords:
            raise ConfigError(
                f"algorithm.{key}={value} with {name}, whose loss has no such term; "
                f"set algorithm.{key}=0"
            )
    if settings.lagging_decay and LAGGING not in algorithm.needs:
        raise ConfigError(
            f"algorithm.lagging_decay={settings.lagging_decay} with {name}: nothing uses a lagging "
            "policy; set algorithm.lagging_decay=0, or with awm algorithm.lagging_kl_coef"
        )
    if LAGGING in algorithm.needs and not settings.lagging_decay:
        raise ConfigError(
            f"algorithm.lagging_kl_coef={settings.lagging_kl_coef} with {name} needs a lagging "
            "policy; set algorithm.lagging_decay, e.g. to 0.3"
        )
    _check_samples(config, algorithm)


def constants_without_use(config: AlgorithmConfig, algorithm: Algorithm) -> list[str]:
    """Return key=value of each constant that is not the default and that the loss does not take.

    They are not refused: a file that is laid over another leaves that one's constants in it.
    """
    if config.name not in ALGORITHMS:
        return []
    taken = set(algorithm.loss.keywords) if isinstance(algorithm.loss, partial) else set()
    defaults = with_algorithm_defaults(AlgorithmConfig(name=config.name))
    return [
        f"algorithm.{key}={getattr(config, key)}"
        for key, arguments in CONSTANTS.items()
        if not arguments & taken and getattr(config, key) != getattr(defaults, key)
    ]


def unbalanced_rewards(config: Config) -> str:
    """Return a warning where rewards of different prompts share one std, or none; "" elsewhere."""
    kind = config.algorithm.advantage
    if kind not in ("global", "none"):
        return ""

    weighted = {name: reward for name, reward in config.reward.items() if reward.weight}
    first = next(iter(weighted), "")
    for name, reward in weighted.items():
        if reward.only != weighted[first].only:
            return (
                f"algorithm.advantage={kind} with reward.{first}.only={weighted[first].only} and "
                f"reward.{name}.only={reward.only}: their prompts are not scaled apart, so the "
                "reward that spreads less trains less; set algorithm.advantage=group or gdpo"
            )
    return ""


def _check_supervised(config: Config, algorithm: Algorithm) -> None:
    settings = config.algorithm
    name = f"algorithm.name={settings.name}"
    if algorithm.rows not in ITEMS:
        raise ConfigError(
            f"{name} has rows={algorithm.rows!r} and on_policy=False, but given images have no "
            f"such rows; set rows to {' or '.join(ITEMS)}"
        )
    if LAGGING in algorithm.needs:
        raise ConfigError(
            f"{name} has on_policy=False and needs a lagging policy, which follows in RL alone; "
            "leave it out of needs"
        )
    for rows, kind in ITEMS.items():
        value = attrgetter(kind.key)(config)
        if rows == algorithm.rows and not value:
            raise ConfigError(f"{name} needs {kind.key}: {kind.formats}")
        if rows != algorithm.rows and value:
            wanted = ITEMS[algorithm.rows].key
            raise ConfigError(
                f"{kind.key}={value} with {name}, which trains on {wanted}; set {kind.key}=''"
            )
    if algorithm.rows == "pairs" and settings.group_size != 1:
        raise ConfigError(
            f"algorithm.group_size={settings.group_size} with {name}: of each pair the noise is "
            f"drawn algorithm.noise_levels={settings.noise_levels} times; "
            "set algorithm.group_size=1"
        )


def _check_steps(config: Config, algorithm: Algorithm) -> None:
    settings = config.algorithm
    rollout = config.rollout
    name = f"algorithm.name={settings.name}"
    if not rollout.sde_window_size:
        raise ConfigError(
            f"rollout.sde_window_size=0 with {name}, which trains stochastic steps; "
            "set rollout.sde_window_size, e.g. to 2"
        )
    if algorithm.sde_types and rollout.sde_type not in algorithm.sde_types:
        raise ConfigError(
            f"rollout.sde_type={rollout.sde_type} with {name}, whose ratio needs a log density; "
            f"set rollout.sde_type to {' or '.join(sorted(algorithm.sde_types))}"
        )
    if settings.trained_steps > rollout.sde_window_size:
        raise ConfigError(
            f"algorithm.trained_steps={settings.trained_steps} > "
            f"rollout.sde_window_size={rollout.sde_window_size}; set trained_steps to at most that"
        )
    if config.train.staleness and settings.old_log_prob != "recompute":
        raise ConfigError(
            f"train.staleness={config.train.staleness} with "
            f"algorithm.old_log_prob={settings.old_log_prob} and {name}: a ratio to log_probs of "
            "weights one step older does not start at 1, and is clipped for that; set "
            "algorithm.old_log_prob=recompute, or train.staleness=0"
        )
    if (
        rollout.fp8
        and algorithm.compares_rollout  # another ratio has no limit that FP8 could reach
        and settings.old_log_prob == "rollout"
        and config.parity.mode == "refuse"
    ):
        raise ConfigError(
            f"rollout.fp8 with algorithm.old_log_prob=rollout and {name}: FP8 log_probs are "
            "further from the trainer's than any clip range in use, and the gate would refuse "
            "them; set algorithm.old_log_prob=auto"
        )
    if settings.step_weight == "level" and rollout.sde_window_moves:
        # the mean that a step's noise is divided by is of the steps that its window may reach
        raise ConfigError(
            f"algorithm.step_weight=level with rollout.sde_window_moves={rollout.sde_window_moves}:"
            " a step would be weighed against its own window alone; set sde_window_moves=0, or "
            "step_weight=none"
        )


def _check_levels(config: Config, algorithm: Algorithm) -> None:
    settings = config.algorithm
    rollout = config.rollout
    name = f"algorithm.name={settings.name}"
    # else a sample would not end in clean latents alone, and its noise would be for nothing
    for key, value, neutral in (
        ("rollout.sde_window_size", rollout.sde_window_size, 0),
        ("rollout.component_windows", rollout.component_windows, "any"),
        ("algorithm.old_log_prob", settings.old_log_prob, "rollout"),
        ("algorithm.trained_steps", settings.trained_steps, 0),
        ("algorithm.step_weight", settings.step_weight, "none"),
    ):
        if value != neutral:
            raise ConfigError(
                f"{key}={value} with {name}, which trains clean samples at drawn noise levels, not "
                f"stochastic steps; set {key}={neutral}"
            )
    if settings.name == "rwr" and settings.adv_clip_max > MAX_EXPONENT * settings.beta:
        exponent = settings.adv_clip_max / settings.beta
        least = math.ceil(100 * settings.adv_clip_max / MAX_EXPONENT) / 100
        raise ConfigError(
            f"algorithm.adv_clip_max={settings.adv_clip_max} / algorithm.beta={settings.beta} = "
            f"{exponent:.4g} > {MAX_EXPONENT} with {name}: a sample weighs up to exp({exponent:.4g}"
            "), and its squared gradient may leave float32; "
            f"set algorithm.beta>={least:g}, or a smaller adv_clip_max"
        )
    num_levels = rollout.num_inference_steps - algorithm.first_level
    if settings.noise_levels > num_levels:
        raise ConfigError(
            f"algorithm.noise_levels={settings.noise_levels} > {num_levels}, the levels that "
            f"{name} draws from with rollout.num_inference_steps={rollout.num_inference_steps}; "
            f"set algorithm.noise_levels<={num_levels}"
        )


def _check_samples(config: Config, algorithm: Algorithm) -> None:
    """Check what a group leaves to train on, and that updates can share it."""
    settings = config.algorithm
    num_updates = config.train.updates_per_step
    num_trained = settings.trained_samples
    if num_trained > settings.group_size:
        raise ConfigError(
            f"algorithm.trained_samples={num_trained} > "
            f"algorithm.group_size={settings.group_size}; set it to at most that, or 0 for all"
        )
    if num_trained % num_updates:
        raise ConfigError(
            f"algorithm.trained_samples={num_trained} is not a multiple of "
            f"train.updates_per_step={num_updates}: each update takes an equal part of every "
            f"group; set algorithm.trained_samples={num_updates * (num_trained // num_updates + 1)}"
            ", or train.updates_per_step=1"
        )

    if algorithm.rows != "pairs":
        return
    if num_trained:
        raise ConfigError(
            f"algorithm.trained_samples={num_trained} with algorithm.name={settings.name}, which "
            "trains the best and the worst of a group; set algorithm.trained_samples=0"
        )
    if config.train.microbatch_size % 2:
        raise ConfigError(
            f"train.microbatch_size={config.train.microbatch_size} is odd, and a pair may not be "
            f"split; set train.microbatch_size={config.train.microbatch_size + 1}"
        )
    if settings.noise_levels % num_updates:
        raise ConfigError(
            f"algorithm.noise_levels={settings.noise_levels} is not a multiple of "
            f"train.updates_per_step={num_updates}: each update takes equally many of a pair's "
            "levels; set train.updates_per_step=1, or more levels"
        )
