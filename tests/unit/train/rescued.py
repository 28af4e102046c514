"""Ranks of a run that is rescued, without weights: a main thread each, in one process."""

from __future__ import annotations

import json
import random
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import torch

from megadiff.engines.gate import StepGate
from megadiff.train.board import Board
from megadiff.train.rescue import Rescue
from megadiff.types import Progress

UPDATES_PER_STEP = 2
CPU = torch.device("cpu")


class Engine:
    """Weights that count their updates; the file of a rank says how many."""

    def __init__(self, rank: int) -> None:
        self.gate = StepGate(CPU)
        self.rank = rank
        self.weight = 0

    def save_now(self, folder: Path, timeout_s: float) -> None:
        self.gate.end(timeout_s)
        if self.gate.is_torn:
            raise RuntimeError("an optimizer step broke off half-way")
        (folder / f"rank_{self.rank}.json").write_text(json.dumps(self.weight))


class Checkpoints:
    """Folders as train.checkpoint has them, without tensors."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.saved_step = 0
        self.in_flight = None
        self.config = SimpleNamespace(checkpoint=SimpleNamespace(resume="auto"))

    def folder_of(self, step: int) -> Path:
        return self.folder / f"step_{step}"

    def begin_rescue(self, step: int) -> Path:
        aside = self.folder / f".writing_{step}"
        aside.mkdir(exist_ok=True)
        return aside

    def save_beside(self, aside: Path, step: int) -> None:
        pass

    def complete(self, aside: Path, progress: Progress) -> None:
        aside.rename(self.folder_of(progress.step))
        self.saved_step = progress.step


class Rank:
    """A main thread that trains in step with its peers, and its rescue."""

    def __init__(self, rank: int, size: int, folder: Path, source: random.Random) -> None:
        self.engine = Engine(rank)
        self.checkpoints = Checkpoints(folder)
        self.progress = Progress()
        board = Board(folder / ".ranks-test", rank=rank, world_size=size)
        self.rescue = Rescue(self.engine, self.checkpoints, board, self.progress)
        self.pauses = [source.uniform(0, 0.004) for _ in range(400)]

    def train(self, reduce: threading.Barrier) -> None:
        """reduce stands for the all-reduce of the gradient's norm, which every rank must join."""
        for update, pause in enumerate(self.pauses, start=1):
            time.sleep(pause)
            try:
                reduce.wait(timeout=20)
            except threading.BrokenBarrierError:
                return
            with self.engine.gate.step():
                self.engine.weight += 1
                time.sleep(pause / 4)
            if update % UPDATES_PER_STEP == 0:
                self.rescue.finish_step(self.progress, {"position": update})


def laid_out(folder: Path, size: int, seed: int = 0) -> list[Rank]:
    """Return the ranks of an attempt, each of which has its word on the board."""
    source = random.Random(seed)
    ranks = [Rank(rank, size, folder, source) for rank in range(size)]
    ranks[0].rescue.board.lay_out()
    for rank in ranks:
        rank.rescue.board.say()
    return ranks
