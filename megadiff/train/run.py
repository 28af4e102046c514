"""The parts of a run that both loops have."""

from __future__ import annotations

from dataclasses import dataclass

from megadiff.algorithms import Algorithm
from megadiff.checkpoint.checkpoints import Checkpoints
from megadiff.engines.base import Engine
from megadiff.train.record import Recorder
from megadiff.train.rescue import Rescue
from megadiff.types import Progress


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """Hold what trains, saves and records, built by `megadiff.train.build`."""

    engine: Engine
    algorithm: Algorithm
    checkpoints: Checkpoints
    recorder: Recorder
    rescue: Rescue
    progress: Progress
