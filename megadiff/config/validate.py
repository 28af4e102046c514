"""Rules between keys. Each error gives both numbers, the rule and the fix."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from megadiff.config.load import ConfigError
from megadiff.config.schema import Config

MAX_LORA_RANK = 512  # of vLLM's MaxLoRARanks; ranks between its steps are fine
FLOAT32_MAX = 3.4028234663852886e38
INT64_MAX = 2**63 - 1
CHOICES = {
    "run.device": ("auto", "cpu", "cuda"),
    "model.dtype": ("float32", "bfloat16"),
    "engine.dtype": ("float32", "bfloat16"),
    "engine.backend": ("veomni", "megatron"),
    "engine.fp8": ("none", "hybrid"),
    "algorithm.name": ("flow_grpo", "sft"),
    "algorithm.old_log_prob": ("rollout", "recompute", "auto"),
    "rollout.sde_type": ("flow_sde", "dance_sde", "flow_cps"),
    "rollout.expert_windows": ("any", "balanced"),
    "rollout.mode": ("colocated", "separate"),
    "rollout.sleep": ("auto", "always", "never"),
    "train.expert_balance": ("share", "equal"),
    "sync.transport": ("auto", "http", "shm", "nccl", "disk"),
    "parity.mode": ("refuse", "warn", "off"),
}
AT_LEAST = {
    "train.num_steps": 0,
    "train.prompts_per_step": 1,
    "train.updates_per_step": 1,
    "train.microbatch_size": 1,
    "algorithm.group_size": 1,
    "algorithm.kl_coef": 0,
    "algorithm.caption_drop": 0,
    "algorithm.ema_decay": 0,
    "engine.activation_memory_budget": 0,
    "lora.rank": 0,
    "lora.alpha": 0,
    "optim.weight_decay": 0,
    "optim.beta1": 0,
    "optim.beta2": 0,
    "optim.eps": 1e-30,  # smaller ones are 0 beside float32 gradients, and 0/0 is the first update
    "optim.warmup_steps": 0,
    "optim.skip_nonfinite": 0,
    "rollout.height": 1,
    "rollout.width": 1,
    "rollout.num_frames": 1,
    "rollout.true_cfg_scale": 0,
    "rollout.guidance_scale": 0,
    "rollout.guidance_scale_2": 0,
    "rollout.num_inference_steps": 2,
    "rollout.sde_window_size": 1,
    "rollout.batch_size": 1,
    "rollout.num_replicas": 0,
    "rollout.tp": 1,
    "sync.bucket_mib": 1,
    "checkpoint.keep": 1,
    "checkpoint.every": 0,
    "eval.every": 0,
    "eval.num_samples": 0,
    "eval.num_inference_steps": 0,
    "data.max_prompt_chars": 1,
    "sample_every": 0,
}
AT_MOST = {  # what a replica takes: megadiff/rollout/limits.py; and what float32 survives
    "optim.lr": 10,
    "optim.weight_decay": 1000,
    "optim.eps": 1,
    "algorithm.kl_coef": 10**6,
    "rollout.eta": 100,
    "rollout.true_cfg_scale": 100,
    "rollout.guidance_scale": 100,
    "rollout.guidance_scale_2": 100,
    "data.max_prompt_chars": 2000,
    "algorithm.group_size": 1024,
    "rollout.height": 4096,
    "rollout.width": 4096,
    "rollout.num_frames": 1024,
    "rollout.num_inference_steps": 1000,
    "rollout.batch_size": 1024,
    "rollout.num_replicas": 1024,
    "rollout.tp": 1024,
    "rollout.start_timeout_s": 10**6,
    "rollout.request_timeout_s": 10**6,
    "eval.num_samples": 10**6,
    "eval.num_inference_steps": 1000,
    "algorithm.caption_drop": 1,
    "algorithm.ema_decay": 1,
    "engine.activation_memory_budget": 1,
    "sync.bucket_mib": 4096,
}
BELOW = {
    "optim.beta1": 1,
    "optim.beta2": 1,
}
ONE_BACKEND_ONLY = {  # key → (the engine.backend that has it, the value that it must have for another)
    "parallel.tp": ("megatron", 1),
    "engine.fp8": ("megatron", "none"),
    "engine.compile": ("veomni", False),
    "parallel.dp_replicate": ("veomni", 1),
}
POSITIVE = (
    "optim.lr",
    "optim.max_grad_norm",
    "rollout.eta",
    "algorithm.clip_range",
    "algorithm.adv_clip_max",
    "rollout.start_timeout_s",
    "rollout.request_timeout_s",
)


def validate(config: Config, *, dp: int) -> None:
    """Raises ConfigError for the first rule that is broken. dp: the resolved data-parallel size."""
    _check_numbers(config)
    for key, choices in CHOICES.items():
        if _get(config, key) not in choices:
            raise ConfigError(f"{key}={_get(config, key)!r} is not one of {', '.join(choices)}")
    for key, least in AT_LEAST.items():
        if _get(config, key) < least:
            raise ConfigError(f"{key}={_get(config, key)} < {least}; set {key}>={least}")
    for key, most in AT_MOST.items():
        if _get(config, key) > most:
            raise ConfigError(f"{key}={_get(config, key)} > {most}; set {key}<={most}")
    for key, bound in BELOW.items():
        if _get(config, key) >= bound:
            raise ConfigError(f"{key}={_get(config, key)} >= {bound}; set {key}<{bound}")
    for key in POSITIVE:
        if not _get(config, key) > 0:
            raise ConfigError(f"{key}={_get(config, key)} is not positive; set {key}>0")
    for component, rate in config.optim.component_lr.items():
        key = f"optim.component_lr.{component}"
        most = AT_MOST["optim.lr"]
        if not 0 < rate <= most:
            raise ConfigError(f"{key}={rate} is not within 0 and {most}; set 0<{key}<={most}")
    if not config.run.name.strip():
        raise ConfigError(f"run.name={config.run.name!r} names no folder; set run.name")
    _check_engine(config)
    _check_lora(config)
    if config.algorithm.name == "sft":
        _check_sft(config)
    else:
        _check_rl(config)
    _check_window_range(config)
    if config.rollout.sde_type == "flow_cps" and config.rollout.eta > 1:
        raise ConfigError(
            f"rollout.eta={config.rollout.eta} > 1 with rollout.sde_type=flow_cps (an angle of eta·90°)"
        )
    _check_batch(config, dp=dp)
    _check_fp8_rollout(config)
    if config.rollout.sleep == "always" and config.rollout.mode == "separate":
        raise ConfigError(
            "rollout.sleep=always with rollout.mode=separate: replicas with GPUs of their own keep their weights; set "
            "rollout.sleep=auto"
        )
    if config.rollout.mode == "separate" and not config.rollout.registry:
        raise ConfigError(
            "rollout.mode=separate needs rollout.registry, the folder that `megadiff serve --registry` writes to"
        )
    if config.eval.every and not config.eval.prompts:
        raise ConfigError(
            f"eval.every={config.eval.every} but eval.prompts is empty; set eval.prompts to a prompt file"
        )


def _check_numbers(config: Config) -> None:
    """Refuse what is not a number to torch: NaN and infinity, also in float32, or beyond int64."""
    for key, value in _numbers(config):
        if isinstance(value, float) and not abs(value) <= FLOAT32_MAX:
            raise ConfigError(
                f"{key}={value} is not a finite number in float32 (at most {FLOAT32_MAX:.2g}); "
                "set another"
            )
        if isinstance(value, int) and abs(value) > INT64_MAX:
            raise ConfigError(f"{key}={value} is beyond int64's ±{INT64_MAX}; set a smaller one")


def _numbers(value: object, key: str = "") -> Iterator[tuple[str, int | float]]:
    """Every number of the config with its key. A reward's args are for its own class to check."""
    if isinstance(value, (int, float)):
        yield key, value
        return
    if dataclasses.is_dataclass(value):
        children = vars(value).items()
    elif isinstance(value, dict):
        children = value.items()
    elif isinstance(value, list):
        children = enumerate(value)
    else:
        return
    for name, child in children:
        if not (key.startswith("reward.") and name == "args"):
            yield from _numbers(child, f"{key}.{name}" if key else str(name))


def _check_fp8_rollout(config: Config) -> None:
    if not config.rollout.fp8:
        return
    if config.model.dtype != "bfloat16":
        raise ConfigError(
            f"rollout.fp8 needs model.dtype=bfloat16, not {config.model.dtype}; set rollout.fp8=false"
        )
    if config.algorithm.old_log_prob == "rollout" and config.parity.mode == "refuse":
        raise ConfigError(
            "rollout.fp8 with algorithm.old_log_prob=rollout: FP8 log_probs are further from the trainer's than any clip range "
            "in use, and the gate would refuse them; set algorithm.old_log_prob=auto"
        )


def sleeps(config: Config, *, device_type: str) -> bool:
    """Whether replicas free their weights while the trainer works; the push that wakes them brings all weights.

    rollout.sleep=auto: on GPUs where every push does so anyway, thus neither with LoRA nor with train.components.
    """
    if config.rollout.mode != "colocated" or config.rollout.sleep == "never":
        return False
    brings_all = not (config.lora.rank or config.train.components)
    return config.rollout.sleep == "always" or (device_type == "cuda" and brings_all)


def _check_engine(config: Config) -> None:
    for key, (backend, neutral) in ONE_BACKEND_ONLY.items():
        if config.engine.backend != backend and _get(config, key) != neutral:
            raise ConfigError(
                f"{key}={_get(config, key)} with engine.backend={config.engine.backend}, which has no such thing; set {key}="
                f"{neutral}, or engine.backend={backend}"
            )
    if config.engine.fp8 != "none" and config.engine.dtype != "bfloat16":
        raise ConfigError(
            f"engine.fp8={config.engine.fp8} with engine.dtype={config.engine.dtype}: what is not in FP8 is in bfloat16; "
            "set engine.dtype=bfloat16"
        )


def _check_lora(config: Config) -> None:
    lora, fp8 = config.lora, config.engine.fp8
    if lora.alpha and not lora.rank:
        raise ConfigError(
            f"lora.alpha={lora.alpha} with lora.rank=0, which is no LoRA; set lora.rank, or lora.alpha=0"
        )
    if lora.rank > MAX_LORA_RANK:
        raise ConfigError(
            f"lora.rank={lora.rank} is above {MAX_LORA_RANK}, the highest that vllm-omni's replicas take; set "
            f"lora.rank={MAX_LORA_RANK} or less, or train all weights (lora.rank=0)"
        )
    if lora.rank and fp8 != "none":
        raise ConfigError(
            f"lora.rank={lora.rank} with engine.fp8={fp8}: adapters are put beside layers in engine.dtype only; set "
            "engine.fp8=none, or lora.rank=0"
        )


def _check_rl(config: Config) -> None:
    if not config.reward:
        raise ConfigError("no reward is configured; add e.g. reward.color.type=color")
    if not config.data.prompts:
        raise ConfigError(
            f"algorithm.name={config.algorithm.name} needs data.prompts, a .txt, .jsonl or .parquet file"
        )
    if config.algorithm.ema_decay:
        raise ConfigError(
            f"algorithm.ema_decay={config.algorithm.ema_decay} with algorithm.name={config.algorithm.name}: replicas must "
            "sample from the trained weights, not from their average; set algorithm.ema_decay=0"
        )
    if config.algorithm.old_log_prob == "auto" and config.parity.mode == "off":
        raise ConfigError(
            "algorithm.old_log_prob=auto with parity.mode=off: the gate's gap decides; set parity.mode=refuse, or "
            "algorithm.old_log_prob=recompute"
        )
    if config.algorithm.group_size < 2:
        raise ConfigError(
            f"algorithm.group_size={config.algorithm.group_size} < 2: advantages are relative to a group; "
            "set algorithm.group_size, e.g. to 16"
        )


def _check_sft(config: Config) -> None:
    if not config.data.images:
        raise ConfigError(
            "algorithm.name=sft needs data.images: a folder with metadata.jsonl, a .parquet or .tar file, or module:Class"
        )
    if config.eval.every and not config.reward:
        raise ConfigError(
            f"eval.every={config.eval.every} without a reward; add e.g. reward.color.type=color"
        )
    without_use = (
        ("algorithm.kl_coef", 0),
        ("train.updates_per_step", 1),
        ("rollout.first_frame", False),
        ("optim.skip_nonfinite", 0),
    )
    for key, only in without_use:
        if _get(config, key) != only:
            raise ConfigError(
                f"{key}={_get(config, key)} with algorithm.name=sft, which has no use for it; set it to {only}"
            )


def _check_window_range(config: Config) -> None:
    window = config.rollout.sde_window_range
    if len(window) != 2:
        raise ConfigError(
            f"rollout.sde_window_range={window} has {len(window)} numbers, not 2; write e.g. [0,5]"
        )


def _check_batch(config: Config, *, dp: int) -> None:
    train, group_size = config.train, config.algorithm.group_size
    if train.prompts_per_step % dp:
        raise ConfigError(
            f"train.prompts_per_step={train.prompts_per_step} is not a multiple of dp={dp}: every data-parallel rank owns "
            f"whole prompt groups; set train.prompts_per_step={_next_multiple(train.prompts_per_step, dp)}"
        )
    if group_size % train.updates_per_step:
        raise ConfigError(
            f"algorithm.group_size={group_size} is not a multiple of train.updates_per_step={train.updates_per_step}: each "
            "update takes an equal part of every group; "
            f"set algorithm.group_size={_next_multiple(group_size, train.updates_per_step)}"
        )


def _next_multiple(value: int, of: int) -> int:
    return -(-value // of) * of


def _get(config: Config, key: str):
    value: object = config
    for name in key.split("."):
        value = getattr(value, name)
    return value
