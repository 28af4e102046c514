"""Ask a run to stop in the middle of a stage, from within its own process."""

from __future__ import annotations

import importlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import megadiff.train.build as build
from megadiff.data.flow import FlowBatches
from megadiff.engines.engine import Engine
from megadiff.engines.sharded import ShardedEngine
from megadiff.rewards.score import Scorer
from megadiff.rollout.client.fleet import Fleet
from megadiff.sync.sync import WeightSync
from megadiff.train import parity

HEARD_S = 1.5  # a run looks once a second
STAGES: dict[str, tuple[object, str, int]] = {  # where, what is called, at which call
    "imports": (importlib, "import_module", 1),
    "build": (build, "build_engine", 1),
    "gate": (parity, "check", 1),
    "rollout": (Fleet, "generate", 1),
    "reward": (Scorer, "collect", 1),
    "train": (ShardedEngine, "_backward", 2),
    "sync": (WeightSync, "push", 2),  # the first is the gate's
    "evaluation": (build, "evaluate", 1),
    "checkpoint": (Engine, "snapshot", 1),
    "images": (FlowBatches, "__next__", 3),
}


def ask_in(
    stage: str, ask: Callable[[], object], *, pause_s: float = HEARD_S, at_call: int = 0
) -> None:
    """Let the stage ask and last pause_s longer; at one call of it, in this process.

    at_call: from 1, by default the stage's own.
    """
    where, name, first_call = STAGES[stage]
    stock = getattr(where, name)
    calls = iter(range(1, 10**6))

    def slow(*arguments, **options):
        if next(calls) == (at_call or first_call):
            ask()
            time.sleep(pause_s)
        return stock(*arguments, **options)

    setattr(where, name, slow)


def by_file(folder: Path, text: str = "") -> None:
    folder.mkdir(exist_ok=True)
    (folder / "stop").write_text(text)


def by_signal() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)
