"""Let torch take a GPU's memory in segments that grow and shrink by pages.

Memory that is freed can then go back to the device, and not only whole segments of it. Each page
costs a few calls of the driver, whatever its size, and torch's own are small.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager

import torch

VARIABLE = "PYTORCH_ALLOC_CONF"
# torch's earlier name of the variable, which a user may still set.
_OLD_NAME = "PYTORCH_CUDA_ALLOC_CONF"
_GROWING = "expandable_segments:True"
_FIXED = "expandable_segments:False"
# Each stream keeps up to one page for nothing. torch's own are of 20 MiB.
_PAGE_SIZE = "large_segment_size_mb:128"


def grow_segments(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set it for processes of this environment, and for this one if it has not used a GPU yet.

    A setting of the user's stays.
    """
    if _OLD_NAME not in environment:
        environment.setdefault(VARIABLE, f"{_GROWING},{_PAGE_SIZE}")


@contextmanager
def fixed_segments() -> Iterator[None]:
    """Let other processes open the memory that is allocated within, in any thread.

    A handle of growing segments needs a right (pidfd_getfd) that containers withhold.
    """
    settings = os.environ.get(VARIABLE, os.environ.get(_OLD_NAME, "")).replace(" ", "")
    if _GROWING not in settings:
        yield
        return

    # The whole setting: torch takes what is left out for its default.
    torch._C._accelerator_setAllocatorSettings(settings.replace(_GROWING, _FIXED))
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(settings)
