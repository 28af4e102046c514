"""Runs that save and load the checkpoints of three small tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from megadiff.checkpoint.checkpoints import Checkpoints
from megadiff.config.schema import Config
from megadiff.tensors.shards import Shard, ShardFolder
from megadiff.tensors.snapshot import Snapshot
from megadiff.types import Progress
from tests.meshes import one_rank_mesh

NAMES = ("model/a", "model/b", "optim/exp_avg/a")


class Trained:
    """Three tensors whose values are the step, in the engines' own file format."""

    def __init__(self, num_elements: int = 1000) -> None:
        self.tensors = {name: torch.zeros(num_elements) for name in NAMES}

    def train(self, step: int) -> Progress:
        for tensor in self.tensors.values():
            tensor.fill_(step)
        return Progress(step=step, prompts={"position": 4 * step})

    def _shard(self, tensor: Tensor) -> Shard:
        return Shard(local=tensor, offsets=(0,), shape=tuple(tensor.shape))

    def snapshot(self) -> Snapshot:
        by_name = {name: [self._shard(tensor)] for name, tensor in self.tensors.items()}
        return Snapshot(shards=by_name, rank=0, num_files=1, values={})

    def load(self, folder: Path) -> None:
        source = ShardFolder(folder)
        for name, tensor in self.tensors.items():
            source.read_into(name, self._shard(tensor))


def run_of(folder: Path, *, base: Mapping[str, str] | None = None, **keys: object) -> Checkpoints:
    """Return the checkpoints of a run. keys: of its config's section `checkpoint`."""
    config = Config()
    config.run.name = "test"
    config.train.num_steps = 1000
    for key, value in keys.items():
        setattr(config.checkpoint, key, value)
    return Checkpoints(folder, config, one_rank_mesh(), base=base)


def save_steps(run: Checkpoints, *steps: int) -> None:
    engine = Trained()
    for step in steps:
        run.save(engine, engine.train(step))
    run.settle()


def loaded(run: Checkpoints, num_elements: int = 1000) -> Progress:
    """Load what a run continues from, whose bits are right."""
    engine = Trained(num_elements)
    prompts: dict[str, int | str] = {}
    progress = run.load(engine, prompts.update)
    for name, tensor in engine.tensors.items():
        assert tensor.eq(progress.step).all(), name
    assert prompts == progress.prompts
    return progress


def names_in(run: Checkpoints) -> list[str]:
    return sorted(path.name for path in run.folder.iterdir() if path.is_dir())
