"""AdamW, the same for every device and engine: a checkpoint of one is read by all."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from megadiff.config.schema import Config, OptimConfig


def build_adamw(optim: OptimConfig, parameters: Mapping[str, Tensor]) -> torch.optim.AdamW:
    """Build AdamW, with weight decay on what decays() alone.

    It is torch's on every device and for every engine: checkpoints hold its state, by name, so
    that the groups may differ from those of the run that wrote it.
    """
    decaying = [p for name, p in parameters.items() if decays(name, p)]
    others = [p for name, p in parameters.items() if not decays(name, p)]
    groups = [
        {"params": decaying, "weight_decay": optim.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, fused=True
    )


def decays(name: str, parameter: Tensor) -> bool:
    """Tell whether weight decay acts on a parameter: on the matrices of layers.

    Decay pulls towards 0, but a norm's scale belongs near 1, and a vector that is added (a bias,
    Wan's scale_shift_table, Z-Image's pad tokens) anywhere. The latter have several dimensions.
    """
    return parameter.ndim > 1 and name.endswith("weight")


def learning_rate(config: Config, component: str, *, num_updates: int) -> float:
    """Return the next update's learning rate, after num_updates of the component.

    It rises linearly over optim.warmup_steps updates. Then it stays (optim.schedule=constant), or
    falls as a line or half a cosine and would be 0 after the run's last update.
    A pure function, so that a resumed run has the same rates.
    """
    optim = config.optim
    base = optim.component_lr.get(component, optim.lr)
    rate = base * min(1.0, (num_updates + 1) / max(optim.warmup_steps, 1))
    if optim.schedule == "constant" or num_updates < optim.warmup_steps:
        return rate

    total = config.train.num_steps * config.train.updates_per_step
    # a checkpoint may have more updates than a run that was made shorter since
    progress = min((num_updates - optim.warmup_steps) / max(total - optim.warmup_steps, 1), 1.0)
    fall = {"linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
    return rate * fall[optim.schedule]
