"""Ranks write a checkpoint in the background while they train on, and agree on how it ended."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from megadiff.checkpoint import checkpoints as checkpoints_module
from megadiff.checkpoint.checkpoints import CheckpointError, Checkpoints
from megadiff.config.schema import Config
from megadiff.parallel.mesh import init_mesh
from megadiff.tensors.shards import Shard
from megadiff.tensors.snapshot import Snapshot
from megadiff.types import Progress
from tests.distributed.engines import LOSS, at_step, build, differing, layout_of, mine
from tests.distributed.ranks import run_ranks

WAIT_S = 60.0


@pytest.mark.parametrize("backend", ["veomni", "megatron"])
def test_resumed_equals_uninterrupted(tiny_model: Path, tmp_path: Path, backend: str) -> None:
    """Saved after two updates, and written while two more are made."""
    run_ranks(_train_on, 2, tiny_model, tmp_path, backend)
    assert not differing(tmp_path / "end", tmp_path / "again")


def _train_on(model: Path, out: Path, backend: str) -> None:
    engine = build(model, {"dp": 2}, backend=backend, average_decay=0.25, dtype="bfloat16")
    rank = engine.mesh.rank
    run = Checkpoints(out / "run", engine.config, engine.mesh)
    engine.config.train.num_steps = 1000
    engine.config.checkpoint.every = 2
    goes_on = threading.Event()
    stock_write = Snapshot.write

    def slow_write(snapshot: Snapshot, folder: Path, given_up: threading.Event) -> None:
        assert rank == 0 or goes_on.wait(WAIT_S)
        stock_write(snapshot, folder, given_up)

    with patch.object(Snapshot, "write", slow_write):
        for step in range(1, 5):
            if step == 4:
                engine.config.checkpoint.every = 0
            engine.update(at_step(mine(engine), step), LOSS)
            run.after_step(engine, Progress(step=step))
        assert run.in_flight and not run.saved_step
        goes_on.set()
        run.settle()
    assert run.saved_step == 2
    engine.save(out / "end")

    resumed = build(model, {"dp": 2}, backend=backend, average_decay=0.25, dtype="bfloat16")
    progress = Checkpoints(out / "run", resumed.config, resumed.mesh).load(resumed, lambda _: None)
    assert progress.step == 2
    for step in (3, 4):
        resumed.update(at_step(mine(resumed), step), LOSS)
    resumed.save(out / "again")


def test_ranks_agree(tmp_path: Path) -> None:
    run_ranks(_disagree, 2, tmp_path)


class HalfATensor:
    """What one of two ranks has of a tensor."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def snapshot(self) -> Snapshot:
        shard = Shard(local=torch.ones(50), offsets=(50 * self.rank,), shape=(100,))
        return Snapshot(shards={"model/a": [shard]}, rank=self.rank, num_files=2, values={})


def _disagree(out: Path) -> None:
    config = Config()
    config.run.name = "test"
    config.train.num_steps = 1000
    mesh = init_mesh(layout_of({"dp": 2}), "cpu")
    run = Checkpoints(out, config, mesh)
    engine = HalfATensor(mesh.rank)

    # only rank 0's clock counts
    run.config.checkpoint.every = 0
    run.config.checkpoint.every_min = 10.0
    for minutes, is_due in (((9, 11), False), ((11, 9), True)):
        now_s = run._began_s + 60 * minutes[mesh.rank]
        with patch.object(checkpoints_module.time, "monotonic", return_value=now_s):
            run.after_step(engine, Progress(step=1))
        assert bool(run.in_flight or run.saved_step) == is_due
    run.settle()
    run.config.checkpoint.every_min = 0.0

    # rank 0 completes it without another step
    run.save(engine, Progress(step=2))
    deadline = time.monotonic() + WAIT_S
    while not (out / "checkpoints" / "step_000002").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)

    # the disk of rank 1's node is full
    def full(snapshot: Snapshot, folder: Path, given_up: threading.Event) -> None:
        time.sleep(0.3)
        raise OSError(28, "No space left on device")

    run.settle()
    with patch.object(Snapshot, "write", full if mesh.rank else Snapshot.write):
        run.save(engine, Progress(step=3))
        with pytest.raises(CheckpointError, match="rank 1: .*No space left on device"):
            for step in range(4, 1000):
                time.sleep(0.01)
                run.after_step(engine, Progress(step=step))
    assert run.saved_step == 2

    # one rank has no memory for a copy: both are told when all is written
    with patch("megadiff.checkpoint.background.free_bytes", lambda: 0 if mesh.rank else 1 << 30):
        again = Checkpoints(out, config, mesh)
        again.save(engine, Progress(step=9))
        again.settle()
    if mesh.rank == 0:
        names = sorted(path.name for path in again.folder.glob("*step*"))
        assert names == ["step_000002", "step_000009"]
