"""Lets megatron-core run on CPU processes over gloo, where parts of it name CUDA outright. For tests and small trials.

Never acts where there is a GPU to use: `apply` refuses any device but the CPU, `making_optimizer` does nothing there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor

CPU = torch.device("cpu")


def apply(device: torch.device) -> None:
    """Redirect to the CPU what megatron-core does on CUDA without asking; for the whole process.

    Raises ValueError for any other device.
    """
    if device.type != "cpu":
        raise ValueError(
            f"megatron-core on {device} needs none of the stand-ins for the CPU; they must not act there"
        )
    torch.cuda.current_device = lambda: CPU  # where buffers are made
    torch.cuda.synchronize = lambda *args, **kwargs: None
    torch.cuda.set_device = lambda *args, **kwargs: None


@contextmanager
def making_optimizer(device: torch.device) -> Iterator[None]:
    """Within the context, and on the CPU, torch.tensor and Tensor.type answer as megatron-core's optimizers want it.

    Not for longer: with torch.tensor replaced, torch.device("meta") no longer acts on it, and transformers, which goes by
    that, leaves weights uninitialised.
    """
    if device.type != "cpu":
        yield
        return
    stock = torch.tensor, torch.Tensor.type
    torch.tensor, torch.Tensor.type = (
        _made_on_cpu(torch.tensor),
        _named_as_on_cuda(torch.Tensor.type),
    )
    try:
        yield
    finally:
        torch.tensor, torch.Tensor.type = stock


def _made_on_cpu(stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Optimizers keep their flags and scales in tensors made with device="cuda"."""

    @wraps(stock)
    def tensor(*args: Any, **kwargs: Any) -> Tensor:
        return stock(
            *args, **(kwargs | {"device": CPU} if kwargs.get("device") == "cuda" else kwargs)
        )

    return tensor


def _named_as_on_cuda(stock: Callable[..., Any]) -> Callable[..., Any]:
    """The distributed optimizer sorts its parameters by the names of CUDA tensor types."""

    @wraps(stock)
    def tensor_type(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = stock(self, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) else found

    return tensor_type
