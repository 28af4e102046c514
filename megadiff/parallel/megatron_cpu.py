"""Let megatron-core run on CPU processes over gloo, where parts of it name CUDA outright.

For tests and small trials. Nothing here acts on any device but the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, partialmethod
from typing import Any
from unittest import mock

import torch
from torch import Tensor

CPU = torch.device("cpu")


def apply(device: torch.device) -> None:
    """Redirect to the CPU what megatron-core does on CUDA without asking; for the whole process."""
    if device.type != "cpu":
        return
    # megatron-core makes its buffers on this "device"; torch's own returns an index
    torch.cuda.current_device = lambda: CPU  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *args, **kwargs: None
    torch.cuda.set_device = lambda *args, **kwargs: None


@contextmanager
def making_optimizer(device: torch.device) -> Iterator[None]:
    """Make torch.tensor and Tensor.type answer as megatron-core's optimizers want it."""
    if device.type != "cpu":
        yield
        return
    # Not for longer than the context: torch.device("meta") does not act on a replaced torch.tensor,
    # and transformers, which goes by that, leaves weights uninitialised.
    with (
        mock.patch.object(torch, "tensor", partial(_made_on_cpu, torch.tensor)),
        mock.patch.object(Tensor, "type", partialmethod(_named_as_on_cuda, Tensor.type)),
    ):
        yield


def _made_on_cpu(stock: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Call torch.tensor with device="cuda" redirected, where optimizers keep flags and scales."""
    if kwargs.get("device") == "cuda":
        kwargs["device"] = CPU
    return stock(*args, **kwargs)


def _named_as_on_cuda(tensor: Tensor, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call Tensor.type, with CUDA's names, by which the distributed optimizer sorts."""
    name = stock(tensor, *args, **kwargs)
    return name.replace("torch.", "torch.cuda.", 1) if isinstance(name, str) else name
