"""Refuse configs that no run can use. Each error gives both numbers, the rule and the fix.

Bounds and choices of single keys stand in the schema; the rules between keys are functions here.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterator, Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from megadiff.config.load import ConfigError
from megadiff.config.rewards import NAMED_SECTIONS
from megadiff.config.schema import Config

# Written out, as this room does without torch.
FLOAT32_MAX = 3.4028234663852886e38
FREE_FORM = tuple(NAMED_SECTIONS.values())
INT64_MAX = 2**63 - 1
BOUNDS = {  # name in the schema → (what breaks it, that comparison's sign, the sign that it wants)
    "above": (operator.le, "<=", ">"),
    "at_least": (operator.lt, "<", ">="),
    "below": (operator.ge, ">=", "<"),
    "at_most": (operator.gt, ">", "<="),
}
# Refused and not ignored: a run would not be what its config says.
ONE_BACKEND_ONLY = {  # key → (the engine.backend that has it, its value under another)
    "parallel.tp": ("megatron", 1),
    "parallel.dp_replicate": ("veomni", 1),
}
RENAMED_VALUES = {  # (key, refused value) → what to write instead
    ("engine.fp8", "hybrid"): "tensorwise",
}
WITHOUT_USE_IN_SFT = {  # key → the value that it must have
    "algorithm.kl_coef": 0,
    "algorithm.trained_samples": 0,
    "algorithm.trained_steps": 0,
    "algorithm.step_weight": "none",
    "algorithm.lagging_kl_coef": 0,
    "train.updates_per_step": 1,
    "train.staleness": 0,
    "rollout.images": False,
    "rollout.same_noise": False,
    "rollout.sde_window_moves": 0,
    "optim.skip_nonfinite": 0,
}
WITHOUT_USE_WITHOUT_LORA = {  # likewise
    "lora.alpha": 0,
    "lora.targets": [],
    "lora.exclude": [],
    "lora.start": "",
}


def validate(config: Config, *, dp: int, on_policy: bool = True) -> None:
    """Raises ConfigError for the first rule that is broken.

    dp: the resolved data-parallel size. on_policy: as of the config's algorithm.
    """
    # First the numbers alone: the rules between keys compute with them.
    for key, value, rules in _leaves(config):
        _check_number(key, value)
        _check_rules(key, value, rules)

    if not config.run.name.strip():
        raise ConfigError(f"run.name={config.run.name!r} names no folder; set run.name")
    if "/" in config.run.name or config.run.name in (".", ".."):
        raise ConfigError(
            f"run.name={config.run.name!r} is a path, and a run's name is one folder's; where runs "
            f"go is run.dir={config.run.dir}"
        )

    _check_engine(config)
    _check_lora(config)
    if on_policy:
        _check_rl(config)
    else:
        _check_sft(config)
    _check_batch(config, dp=dp)
    _check_schedule(config)
    _check_rollout(config)
    _check_staleness(config)

    if config.eval.every and not config.eval.prompts:
        raise ConfigError(
            f"eval.every={config.eval.every} but eval.prompts is empty; "
            "set eval.prompts to a prompt file"
        )


def sleeps(config: Config, *, device_type: str) -> bool:
    """Tell whether replicas free their weights while the trainer works.

    The push that wakes them brings all weights. rollout.sleep=auto: on GPUs where every push
    does so anyway, thus neither with LoRA nor with train.components.
    """
    if config.rollout.mode != "colocated" or config.rollout.sleep == "never":
        return False
    # Else a push brings only a part, and after a sleep it would have to bring all.
    brings_all = not (config.lora.rank or config.train.components)
    return config.rollout.sleep == "always" or (device_type == "cuda" and brings_all)


def _leaves(
    node: object, key: str = "", rules: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    """Yield every value of the config with its key and the rules that the schema has for it.

    A list's or mapping's rules hold for its values. A reward's args are for its class to check, a
    judge's for vLLM.
    """
    if dataclasses.is_dataclass(node):
        for field in dataclasses.fields(node):
            if not (isinstance(node, FREE_FORM) and field.name in ("args", "only")):
                child_key = f"{key}.{field.name}" if key else field.name
                yield from _leaves(getattr(node, field.name), child_key, field.metadata)
    elif isinstance(node, dict):
        for name, child in node.items():
            yield from _leaves(child, f"{key}.{name}", rules)
    elif isinstance(node, list):
        for index, child in enumerate(node):
            yield from _leaves(child, f"{key}.{index}", rules)
    else:
        yield key, node, rules


def _check_number(key: str, value: object) -> None:
    """Refuse what is not a number to torch: NaN and infinity, also in float32, or beyond int64."""
    # `not <=` and not `>`: NaN compares false either way.
    if isinstance(value, float) and not abs(value) <= FLOAT32_MAX:
        raise ConfigError(
            f"{key}={value} is not a finite number in float32 (at most {FLOAT32_MAX:.2g}); "
            "set another"
        )
    if isinstance(value, int) and abs(value) > INT64_MAX:
        raise ConfigError(f"{key}={value} is beyond int64's ±{INT64_MAX}; set a smaller one")


def _check_rules(key: str, value: Any, rules: Mapping[str, Any]) -> None:
    if isinstance(value, str) and (name := RENAMED_VALUES.get((key, value))):
        raise ConfigError(f"{key}={value} is now {key}={name}; set {key}={name}")
    choices = rules.get("choices")
    if choices and value not in choices:
        raise ConfigError(f"{key}={value!r} is not one of {', '.join(choices)}; set one of them")
    for name, bound in rules.get("bounds", {}).items():
        is_broken, sign, wanted = BOUNDS[name]
        if is_broken(value, bound):
            raise ConfigError(f"{key}={value} {sign} {bound}; set {key}{wanted}{bound}")


def _check_rollout(config: Config) -> None:
    rollout = config.rollout
    window = rollout.sde_window_range
    # Whether the numbers fit the steps is for diffusion/schedule.py to say.
    if len(window) != 2:
        raise ConfigError(
            f"rollout.sde_window_range={window} has {len(window)} numbers, not 2; write e.g. [0,5]"
        )

    if rollout.sde_type == "flow_cps" and rollout.eta > 1:
        raise ConfigError(
            f"rollout.eta={rollout.eta} > 1 with rollout.sde_type=flow_cps (an angle of eta·90°); "
            "set rollout.eta<=1"
        )

    if not rollout.sde_window_size and (rollout.same_noise or rollout.sde_window_moves):
        raise ConfigError(
            f"rollout.same_noise={rollout.same_noise} and rollout.sde_window_moves="
            f"{rollout.sde_window_moves} with rollout.sde_window_size=0: without stochastic steps "
            "samples of one noise are alike, and no window moves; set same_noise=false "
            "sde_window_moves=0, or sde_window_size=2"
        )

    # FP8 products come out in bfloat16.
    if rollout.fp8 and config.model.dtype != "bfloat16":
        raise ConfigError(
            f"rollout.fp8 needs model.dtype=bfloat16, not {config.model.dtype}; "
            "set rollout.fp8=false"
        )

    if rollout.mode == "separate" and rollout.sleep == "always":
        raise ConfigError(
            "rollout.sleep=always with rollout.mode=separate: replicas with GPUs of their own "
            "keep their weights; set rollout.sleep=auto"
        )
    if rollout.mode == "separate" and not rollout.registry:
        raise ConfigError(
            "rollout.mode=separate needs rollout.registry, the folder that "
            "`megadiff serve --registry` writes to"
        )


def _check_staleness(config: Config) -> None:
    staleness = config.train.staleness
    if not staleness:
        return
    if config.rollout.mode != "separate":
        raise ConfigError(
            f"train.staleness={staleness} with rollout.mode={config.rollout.mode}: trainer and "
            "replicas take turns on the same GPUs, so nothing can be drawn ahead; set "
            "rollout.mode=separate, or train.staleness=0"
        )
    for name, judge in config.judge.items():
        if judge.sleep:
            raise ConfigError(
                f"judge.{name}.sleep={judge.sleep} with train.staleness={staleness}: it is asked "
                f"while the policy trains; set judge.{name}.sleep=false, or train.staleness=0"
            )


def _check_engine(config: Config) -> None:
    engine = config.engine
    for key, (backend, neutral) in ONE_BACKEND_ONLY.items():
        value = attrgetter(key)(config)
        if engine.backend != backend and value != neutral:
            raise ConfigError(
                f"{key}={value} with engine.backend={engine.backend}, which has no such thing; "
                f"set {key}={neutral}, or engine.backend={backend}"
            )

    if engine.fp8 == "rowwise" and engine.backend == "megatron":
        raise ConfigError(
            "engine.fp8=rowwise with engine.backend=megatron: Transformer Engine scales whole "
            "tensors; set engine.fp8=tensorwise, or engine.backend=veomni"
        )
    if engine.offload == "always" and config.rollout.mode == "separate":
        raise ConfigError(
            "engine.offload=always with rollout.mode=separate: no replica wants the memory of "
            "these GPUs; set engine.offload=auto, or rollout.mode=colocated"
        )

    if engine.fp8 != "none" and engine.dtype != "bfloat16":
        raise ConfigError(
            f"engine.fp8={engine.fp8} with engine.dtype={engine.dtype}: what is not in FP8 is in "
            "bfloat16; set engine.dtype=bfloat16"
        )


def _check_lora(config: Config) -> None:
    lora = config.lora
    if not lora.rank:
        for key, neutral in WITHOUT_USE_WITHOUT_LORA.items():
            value = attrgetter(key)(config)
            if value != neutral:
                raise ConfigError(
                    f"{key}={value} with lora.rank=0, which is no LoRA; "
                    f"set lora.rank, or {key}={neutral}"
                )

    engine = config.engine
    if lora.rank and engine.fp8 != "none" and engine.backend == "megatron":
        raise ConfigError(
            f"lora.rank={lora.rank} with engine.fp8={engine.fp8} and engine.backend=megatron: "
            "adapters are not put beside Transformer Engine's layers; set engine.fp8=none, or "
            "engine.backend=veomni"
        )


def _check_rl(config: Config) -> None:
    algorithm = config.algorithm
    if not config.reward:
        raise ConfigError("no reward is configured; add e.g. reward.color.type=color")
    if not config.data.prompts:
        raise ConfigError(
            f"algorithm.name={algorithm.name} needs data.prompts, a .txt, .jsonl or .parquet file"
        )

    if algorithm.old_log_prob == "auto" and config.parity.mode == "off":
        raise ConfigError(
            "algorithm.old_log_prob=auto with parity.mode=off: the gate's gap decides; "
            "set parity.mode=refuse, or algorithm.old_log_prob=recompute"
        )

    if algorithm.group_size < 2:
        raise ConfigError(
            f"algorithm.group_size={algorithm.group_size} < 2: advantages are relative to a group; "
            "set algorithm.group_size, e.g. to 16"
        )


def _check_sft(config: Config) -> None:
    if config.eval.every and not config.reward:
        raise ConfigError(
            f"eval.every={config.eval.every} without a reward; add e.g. reward.color.type=color"
        )

    for key, neutral in WITHOUT_USE_IN_SFT.items():
        value = attrgetter(key)(config)
        if value != neutral:
            raise ConfigError(
                f"{key}={value} with algorithm.name={config.algorithm.name}, which has no use for "
                "it; "
                f"set {key}={neutral}"
            )


def _check_batch(config: Config, *, dp: int) -> None:
    num_prompts = config.train.prompts_per_step
    group_size = config.algorithm.group_size
    num_updates = config.train.updates_per_step

    if num_prompts % dp:
        raise ConfigError(
            f"train.prompts_per_step={num_prompts} is not a multiple of dp={dp}: every "
            "data-parallel rank owns whole prompt groups; "
            f"set train.prompts_per_step={math.ceil(num_prompts / dp) * dp}"
        )

    if group_size % num_updates:
        raise ConfigError(
            f"algorithm.group_size={group_size} is not a multiple of "
            f"train.updates_per_step={num_updates}: each update takes an equal part of every "
            f"group; set algorithm.group_size={math.ceil(group_size / num_updates) * num_updates}"
        )


def _check_schedule(config: Config) -> None:
    optim = config.optim
    num_updates = config.train.num_steps * config.train.updates_per_step
    if optim.schedule != "constant" and optim.warmup_steps >= num_updates > 0:
        raise ConfigError(
            f"optim.warmup_steps={optim.warmup_steps} >= {num_updates} optimizer steps "
            "(train.num_steps * train.updates_per_step): none is left for "
            f"optim.schedule={optim.schedule}; set optim.warmup_steps<{num_updates}, or "
            "optim.schedule=constant"
        )
