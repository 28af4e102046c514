"""Every single bit of a checkpoint: a flip is refused, or changes no value that is read."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megadiff.checkpoint.checkpoints import Checkpoints
from megadiff.checkpoint.run_folders import read_config, read_progress
from megadiff.config.schema import Config
from megadiff.parallel.collectives import AgreedError
from megadiff.tensors import shards
from megadiff.tensors.shards import Shard, ShardFolder
from megadiff.tensors.snapshot import Snapshot
from megadiff.types import Progress
from tests.meshes import one_rank_mesh

NUM_RANKS = 2
TENSORS = {
    "model/transformer.weight": torch.arange(30, dtype=torch.float32).reshape(10, 3) / 7,
    "model/transformer.scale": torch.tensor(2.5),
    "optim/exp_avg/transformer.weight": torch.arange(30, dtype=torch.float32).reshape(10, 3) / 9,
}
Values = dict[str, object]


class BothParts:
    """What two ranks write, as one does.

    Its own part comes last: the checkpoint is complete as soon as the only rank's file is there.
    """

    num_bytes = 0

    def __init__(self, parts: list[Snapshot]) -> None:
        self.parts = parts

    def copied(self, memory: torch.Tensor) -> BothParts:
        return self

    def write(self, folder: Path, given_up: threading.Event) -> None:
        for part in reversed(self.parts):
            part.write(folder, given_up)


class TwoRanks:
    """Writes and reads as an engine of two ranks does: matrices by rows, the rest on the first."""

    def __init__(self, *, factor: float = 1.0) -> None:
        self.factor = factor
        self.values: Values = {}

    def snapshot(self) -> BothParts:
        parts = []
        for rank in range(NUM_RANKS):
            pieces = {}
            for name, values in TENSORS.items():
                tensor = self.factor * values
                if tensor.ndim:
                    rows = slice(0, 6) if rank == 0 else slice(6, 10)
                    offsets = (rows.start, 0)
                    pieces[name] = [Shard(local=tensor[rows], offsets=offsets, shape=(10, 3))]
                elif rank == 0:
                    pieces[name] = [Shard(local=tensor, offsets=(), shape=())]
            steps = {"optimizer_steps": {"transformer": 3}}
            parts.append(Snapshot(shards=pieces, rank=rank, num_files=NUM_RANKS, values=steps))
        return BothParts(parts)

    def load(self, folder: Path) -> None:
        self.values = read_tensors(folder)


def read_tensors(folder: Path) -> Values:
    """Return the bits of all that the shard files hold."""
    source = ShardFolder(folder)
    values: Values = {"values": repr(source.values), "num_files": source.num_files}
    for name, shape in source.shapes.items():
        whole = torch.full(shape, float("nan"))
        source.read_into(name, Shard(local=whole, offsets=(0,) * len(shape), shape=shape))
        values[name] = (shape, whole.numpy().tobytes())
    return values


def read_checkpoint(folder: Path) -> Values:
    """Return all that is read of a checkpoint when a run goes on, or when it is converted."""
    values: Values = {"progress": repr(asdict(read_progress(folder)))}
    values["config"] = repr(read_config(folder))
    return values | read_tensors(folder)


def read_run(run: Path) -> Values:
    """Return what a run that goes on by itself loads."""
    engine, prompts = TwoRanks(), {}
    progress = checkpoints(run).load(engine, prompts.update)
    return {"progress": repr(asdict(progress)), "prompts": repr(prompts)} | engine.values


def checkpoints(run: Path, *, num_steps: int = 70) -> Checkpoints:
    config = Config()
    config.run.name = "flips"
    config.train.num_steps = num_steps
    config.model.path = "assets/shapes"
    base = {"path": "assets/shapes", "fingerprint": "0123456789abcdef" * 2}
    return Checkpoints(run, config, one_rank_mesh(), base=base)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one checkpoint, written as runs do."""
    folder = tmp_path_factory.mktemp("run")
    prompts = {"position": 30, "num_prompts": 9, "seed": 0, "shuffle": 1, "digest": "00112233aabb"}
    save(folder, TwoRanks(), Progress(step=5, prompts=prompts))
    return folder


def save(run: Path, engine: TwoRanks, progress: Progress, *, num_steps: int = 70) -> Path:
    written = checkpoints(run, num_steps=num_steps)
    written.save(engine, progress)
    written.settle()
    return written.folder_of(progress.step)


def flip_all(path: Path, read: Callable[[], Values]) -> Counter[str]:
    """Flip every bit of a file, one at a time. Return how many were refused, harmless or silent."""
    data, expected, outcomes = path.read_bytes(), read(), Counter[str]()
    descriptor = os.open(path, os.O_WRONLY)
    for position in range(len(data)):
        for bit in range(8):
            os.pwrite(descriptor, bytes([data[position] ^ 1 << bit]), position)
            try:
                values = read()
            except (ValueError, AgreedError):
                outcomes["refused"] += 1
            else:
                outcomes["harmless" if values == expected else "silent"] += 1
        os.pwrite(descriptor, data[position : position + 1], position)
    os.close(descriptor)
    assert outcomes.total() == 8 * len(data)
    return outcomes


@pytest.mark.parametrize("name", ["rank_00000.safetensors", "rank_00001.safetensors"])
def test_every_bit_of_a_shard_file_is_covered_by_itself(run: Path, name: str) -> None:
    """Read as tools do, without progress.json: header, padding and data."""
    folder = run / "checkpoints" / "step_000005"
    outcomes = flip_all(folder / name, lambda: read_tensors(folder))
    assert outcomes.keys() == {"refused"}, outcomes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rank_00000.safetensors", "progress.json", "config.yaml"])
def test_every_bit_of_a_checkpoint_is_covered(run: Path, name: str) -> None:
    folder = run / "checkpoints" / "step_000005"
    outcomes = flip_all(folder / name, lambda: read_checkpoint(folder))
    assert outcomes.keys() == {"refused"}, outcomes


def test_no_bit_of_latest_changes_what_a_run_goes_on_with(run: Path) -> None:
    """Another name that is older than the newest checkpoint says nothing that is used."""
    outcomes = flip_all(run / "checkpoints" / "latest", lambda: read_run(run))
    assert outcomes["silent"] == 0 and outcomes["refused"] > outcomes["harmless"] > 0, outcomes


@pytest.mark.parametrize("name", ["rank_00001.safetensors", "config.yaml"])
def test_a_file_of_another_checkpoint_is_refused(run: Path, tmp_path: Path, name: str) -> None:
    """Whole by itself, and of the same size."""
    later = save(tmp_path, TwoRanks(factor=2.0), Progress(step=6), num_steps=71)
    earlier = run / "checkpoints" / "step_000005"
    folder = shutil.copytree(earlier, tmp_path / "mixed")
    shutil.copyfile(later / name, folder / name)
    assert (later / name).stat().st_size == (earlier / name).stat().st_size
    assert (later / name).read_bytes() != (earlier / name).read_bytes()
    with pytest.raises(ValueError, match=f"{name} has the digest .* of another checkpoint"):
        read_checkpoint(folder)


@pytest.mark.parametrize("key", ["tensor", "shape", "offsets", "local_shape", "fingerprint"])
@pytest.mark.parametrize("value", [None, 7, True, [], [1.5, 0], {}])
def test_an_index_that_was_sealed_with_nonsense_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: object
) -> None:
    """Never a KeyError, TypeError or AttributeError."""

    def spoiled(index: dict[str, dict[str, dict[str, object]]]) -> str:
        entry = next(iter(index["tensors"].values()))
        entry[key] = value
        if value is None:
            del entry[key]
        return json.dumps(index)

    with monkeypatch.context() as patched:
        patched.setattr(shards, "json", SimpleNamespace(dumps=spoiled))
        whole = Shard(local=torch.ones(4, 2), offsets=(0, 0), shape=(4, 2))
        Snapshot(shards={"a": [whole]}, rank=0, num_files=1).write(tmp_path)
    with pytest.raises(ValueError, match="rank_00000.safetensors"):
        read_tensors(tmp_path)
