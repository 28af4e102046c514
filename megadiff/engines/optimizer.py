"""AdamW, the same for every device and engine: a checkpoint of one is read by all."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from megadiff.config.schema import Config, OptimConfig


def build_adamw(optim: OptimConfig, parameters: Iterable[Tensor]) -> torch.optim.AdamW:
    """AdamW without weight decay on biases, norms and other 1-D parameters.

    It is torch's on every device and for every engine: checkpoints hold its state.
    """
    parameters = list(parameters)
    # decay pulls towards 0, but a norm's scale belongs near 1
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": optim.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, fused=True
    )


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
