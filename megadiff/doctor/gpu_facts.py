"""Carry what a probe of the GPUs says, as JSON between the probe's process and the doctor's."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class GpuDevice:
    """Describe one GPU. total_bytes, free_bytes: of its memory. capability: as "9.0"."""

    name: str
    total_bytes: int
    free_bytes: int
    capability: str


@dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """Hold what torch says of the GPUs.

    devices: empty where CUDA does not start. cuda_error: why not. without_peer: pairs of devices,
    the first of which cannot read the second's memory. ipc_error: why another process could not
    open memory of GPU 0, "" where it could.
    """

    devices: tuple[GpuDevice, ...] = ()
    cuda_error: str = ""
    without_peer: tuple[tuple[int, int], ...] = ()
    ipc_error: str = ""


def from_json(text: str) -> GpuFacts:
    """Read facts that json.dumps(asdict(facts)) wrote; lines before the last are a library's."""
    values: dict[str, Any] = json.loads(text.strip().splitlines()[-1])
    values["devices"] = tuple(GpuDevice(**device) for device in values["devices"])
    values["without_peer"] = tuple((first, second) for first, second in values["without_peer"])
    return GpuFacts(**values)
