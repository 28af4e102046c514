"""AdamW, the same for every device and engine: a checkpoint of one is read by all."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from megadiff.config.schema import OptimConfig


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
