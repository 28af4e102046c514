"""Declare the config keys of algorithms, and the values that are an algorithm's own."""

from __future__ import annotations

from dataclasses import dataclass

from megadiff.config.key import key


@dataclass
class AlgorithmConfig:
    """Choose the loss and its constants."""

    name: str = key("flow_grpo", "Train with this algorithm, built-in or your own module:function.")
    # 1 suits SFT; RL compares within a group, and megadiff/train/check.py wants 2 there.
    group_size: int = key(
        1, "A prompt gets this many samples (SFT: noise draws).", at_least=1, at_most=1024
    )
    trained_samples: int = key(
        0,
        "Of a group only the best and worst, this many together, are trained; 0 is all.",
        at_least=0,
    )
    # Far below PPO's 0.2: log_prob is a mean over latent elements, so ratios stay near 1.
    clip_range: float = key(
        0.0, "The ratio is clipped to 1 ± this; 0 takes the algorithm's own.", at_least=0
    )
    clip_range_high: float = key(
        0.0, "Above 1 the ratio is clipped at 1 + this; 0 takes clip_range.", at_least=0
    )
    adv_clip_max: float = key(
        0.0, "Advantages are clipped to ± this; 0 takes the algorithm's own.", at_least=0
    )
    kl_coef: float = key(
        0.0, "The loss adds the KL to the reference policy times this.", at_least=0, at_most=10**6
    )
    advantage: str = key(
        "global",
        "A reward minus its group's mean is divided by the std of the batch, of the group, or not; "
        "gdpo divides each of several rewards by its std in the group before they are summed.",
        choices=("global", "group", "none", "gdpo"),
    )
    old_log_prob: str = key(
        "rollout",
        "Old log_probs come from the replica, the trainer, or (auto) whom the parity gap allows.",
        choices=("rollout", "recompute", "auto"),
    )
    kl_limit: float = key(
        1e-5, "flow_dppo leaves out steps that moved further than this KL.", above=0
    )
    trained_steps: int = key(
        0,
        "Of a sample's window this many steps, drawn at random, are trained; 0 is all.",
        heading="Algorithms over stochastic steps",
        at_least=0,
    )
    step_weight: str = key(
        "none",
        "A step counts by its injected noise (level), or all alike.",
        choices=("none", "level"),
    )
    noise_levels: int = key(
        2,
        "A sample is noised to this many levels (nft, awm, rwr, dpo; a pair, offline_dpo).",
        heading="Algorithms over noised samples",
        at_least=1,
    )
    beta: float = key(
        0.0,
        "nft's step beyond the old policy, dpo's strength, rwr's temperature; 0: its own.",
        at_least=0,
    )
    matching: str = key(
        "ghuber",
        "awm's log_prob is this function of the matching error.",
        choices=("uniform", "t", "t2", "huber", "ghuber"),
    )
    lagging_decay: float = key(
        0.0,
        "A lagging policy (nft's old one) follows by at most this decay a step; 0 keeps none.",
        at_least=0,
        below=1,
    )
    lagging_decay_rate: float = key(
        0.001,
        "lagging_decay is reached in steps of this, one an optimizer step. Of several components "
        "the one with the most steps counts.",
        above=0,
    )
    lagging_decay_start: int = key(
        0, "The lagging policy copies the trained one for this many optimizer steps.", at_least=0
    )
    lagging_kl_coef: float = key(
        0.0,
        "awm adds the squared distance to the lagging policy's velocity times this.",
        at_least=0,
        at_most=10**6,
    )
    caption_drop: float = key(
        0.1,
        "Supervised training replaces this part of captions by empty ones.",
        heading="Supervised training, and averages",
        at_least=0,
        at_most=1,
    )
    ema_decay: float = key(
        0.0,
        "Evaluate and export weights averaged with this; 0 keeps none. After n updates it is at "
        "most (1 + n) / (10 + n): 0.918 after 100, 0.991 after 1,000.",
        at_least=0,
        at_most=1,
    )


# Values of keys that are 0. One algorithm's would break another: NFT's advantages saturate at
# adv_clip_max, AWM is published with 1, and ratios of another kind need another clip range.
ALGORITHM_DEFAULTS: dict[str, dict[str, float]] = {
    "": {"clip_range": 1e-4, "adv_clip_max": 5.0, "beta": 1.0},
    "grpo_guard": {"clip_range": 2e-6},
    "awm": {"clip_range": 1.0, "adv_clip_max": 1.0},
    "dpo": {"beta": 100.0},
    "offline_dpo": {"beta": 2000.0},
}


def with_algorithm_defaults(config: AlgorithmConfig) -> AlgorithmConfig:
    """Return the config with the algorithm's own values in place of zeros."""
    defaults = ALGORITHM_DEFAULTS[""] | ALGORITHM_DEFAULTS.get(config.name, {})
    defaulted = {name: value for name, value in defaults.items() if not getattr(config, name)}
    return AlgorithmConfig(**vars(config) | defaulted)


def clip_ranges(config: AlgorithmConfig) -> tuple[float, float]:
    """Return how far a ratio may go below 1 and above it before it is clipped."""
    return config.clip_range, config.clip_range_high or config.clip_range


def half_clip_range(config: AlgorithmConfig) -> float:
    """Return half of how far a ratio may go on the side where it may go less far.

    From there on a parity gap is no small part of what is clipped.
    """
    return min(clip_ranges(config)) / 2
