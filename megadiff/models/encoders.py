"""What the adapters' encoders of text and images share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def freed(module: nn.Module) -> Iterator[None]:
    """Afterwards the module holds no memory, though the caller's name for its encoder may outlive the block."""
    try:
        yield
    finally:
        module.to("meta")
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
