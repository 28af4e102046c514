"""Faults of a step, put into a rank by a reward that scores as usual until they are due."""

from __future__ import annotations

import os
import time

import torch

from megadiff.engines.engine import Engine
from megadiff.engines.sharded import ShardedEngine
from megadiff.rewards.base import Reward


def out_of_memory(*_: object) -> None:
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB (as told by a test)"
    )


def library_error(*_: object) -> None:
    raise RuntimeError("a library's own error")


class FailingStep(Reward):
    """Rewards brightness. In `step` (from 1) something goes wrong, on rank `rank`.

    kind: nan (a velocity), out_of_memory, library_error. update: in which update of the step, from
    0. slow_save_s: a rescue's file takes so long.
    """

    def __init__(
        self,
        *,
        kind: str = "nan",
        step: int = 4,
        update: int = 0,
        rank: int = 0,
        groups_per_step: int = 4,
        slow_save_s: float = 0.0,
    ) -> None:
        self.kind = kind
        self.first_group = (step - 1) * groups_per_step
        self.update = update
        self.is_here = int(os.environ.get("RANK", "0")) == rank
        self.slow_save_s = slow_save_s
        self.num_groups = -1  # the first call is no group: every reward is tried out

    def score(self, samples):
        self.num_groups += 1
        if self.is_here and self.num_groups == self.first_group + 1:
            self._spoil()
        return [sample.pixels.mean() / 255 for sample in samples]

    def _spoil(self) -> None:
        updates = iter(range(1000))
        stock_backward = ShardedEngine._backward
        stock_velocity = ShardedEngine._velocity

        def backward(engine, *arguments):
            ShardedEngine._velocity = stock_velocity
            if next(updates) == self.update:
                ShardedEngine._velocity = FAULTS.get(self.kind, poisoned)
            return stock_backward(engine, *arguments)

        def poisoned(engine, *arguments):
            return stock_velocity(engine, *arguments) * float("nan")

        ShardedEngine._backward = backward
        if self.slow_save_s:
            stock_save = Engine.save_now

            def save_now(engine, *arguments):
                time.sleep(self.slow_save_s)
                return stock_save(engine, *arguments)

            Engine.save_now = save_now


FAULTS = {"out_of_memory": out_of_memory, "library_error": library_error}
