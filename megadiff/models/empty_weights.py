"""Let a served transformer's parameters have shape and device, and no memory.

vllm-omni builds a pipeline on the CPU, moves it to its device and loads weights into it. None of
that may take the memory of a base that a trainer on the device holds already.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def empty_parameters(modules: Sequence[nn.Module], device: torch.device) -> None:
    """Put the modules' parameters on a device without their memory: storages of 0 bytes."""
    for module in modules:
        for parameter in module.parameters():
            parameter.data = _without_memory(parameter, device)


@contextmanager
def withheld_parameters(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Take the modules' parameters out of them within the context; buffers stay."""
    owned = []
    for module in modules:
        for owner in module.modules():
            owned.append((owner, dict(owner._parameters)))
            owner._parameters.update(dict.fromkeys(owner._parameters))
    try:
        yield
    finally:
        for owner, parameters in owned:
            owner._parameters.update(parameters)


def skip_sources(pipeline: Any, components: Sequence[str]) -> None:
    """Make vllm-omni's loader leave the components' files alone."""
    prefixes = tuple(f"{component}." for component in components)
    pipeline.weights_sources = [
        source for source in pipeline.weights_sources if not source.prefix.startswith(prefixes)
    ]


def _without_memory(parameter: Tensor, device: torch.device) -> Tensor:
    # one at a time: the device's memory is back before the next is taken
    tensor = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
    tensor.untyped_storage().resize_(0)
    return tensor
