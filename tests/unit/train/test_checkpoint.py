"""Checkpoints are whole or not there, whatever moment the process dies at."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megadiff.config.schema import Config
from megadiff.parallel.collectives import AgreedError
from megadiff.parallel.mesh import init_mesh, resolve_layout
from megadiff.train.checkpoint import Checkpoints, whole_looking
from megadiff.types import Progress
from megadiff.weights.shards import Shard, ShardFolder, write_shards


class SmallEngine:
    """One tensor whose value is the step, in the engines' own file format."""

    def __init__(self):
        self.weight = torch.zeros(1000)

    @property
    def shard(self):
        return Shard(local=self.weight, offsets=(0,), shape=(1000,))

    def save(self, folder):
        write_shards(folder, {"weight": [self.shard]}, rank=0, num_files=1, values={})

    def load(self, folder):
        ShardFolder(folder).read_into("weight", self.shard)


def _checkpoints(folder, **keys):
    config = Config()
    config.run.name, config.checkpoint.keep = "test", 2
    for key, value in keys.items():
        setattr(config.checkpoint, key, value)
    mesh = init_mesh(resolve_layout(dp=0, sp=1, tp=1, dp_replicate=1, world_size=1), "cpu")
    return Checkpoints(folder, config, mesh)


def _save_steps(checkpoints, steps):
    engine = SmallEngine()
    for step in steps:
        engine.weight.fill_(step)
        checkpoints.save(engine, Progress(step=step, prompts={"position": 4 * step}))


def _load(checkpoints):
    engine, prompts = SmallEngine(), {}
    progress = checkpoints.load(engine, prompts.update)
    assert engine.weight.eq(progress.step).all()
    assert prompts == progress.prompts
    return progress


def test_round_trip_keeps_the_newest(tmp_path):
    checkpoints = _checkpoints(tmp_path)
    assert _load(checkpoints) == Progress()
    _save_steps(checkpoints, [1, 2, 3])
    assert [path.name for path in whole_looking(checkpoints.folder)] == ["step_000002", "step_000003"]
    assert (checkpoints.folder / "latest").read_text() == "step_000003"
    assert _load(_checkpoints(tmp_path)) == Progress(step=3, prompts={"position": 12})
    assert _load(_checkpoints(tmp_path, resume="never")) == Progress()
    assert _load(_checkpoints(tmp_path, resume=str(checkpoints.folder / "step_000002"))).step == 2


def _truncate(folder):
    path = folder / "rank_00000.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def _flip(folder):
    path = folder / "rank_00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "text"),
    [
        (_truncate, "rank_00000.safetensors has"),
        (_flip, "does not match its fingerprint"),
        (lambda folder: (folder / "rank_00000.safetensors").unlink(), "rank_00000.safetensors is missing"),
        (lambda folder: (folder / "progress.json").unlink(), "progress.json is missing"),
        (lambda folder: (folder / "progress.json").write_text("{"), "JSONDecodeError"),
    ],
)
def test_a_damaged_one_is_named_and_the_one_before_is_used(tmp_path, caplog, harm, text):
    checkpoints = _checkpoints(tmp_path)
    _save_steps(checkpoints, [1, 2])
    newest = checkpoints.folder / "step_000002"
    harm(newest)
    assert _load(_checkpoints(tmp_path)).step == 1
    assert "step_000002 does not load" in caplog.text and text in caplog.text
    with pytest.raises(AgreedError, match="no checkpoint of"):
        _load(_checkpoints(tmp_path, resume=str(newest)))
    harm(checkpoints.folder / "step_000001")
    with pytest.raises(AgreedError, match="set checkpoint.resume=never"):  # never silently from the start
        _load(_checkpoints(tmp_path))


@pytest.mark.parametrize("resume", ["never", "{folder}/step_000010"])
def test_checkpoints_of_a_history_that_was_given_up_do_not_win(tmp_path, resume):
    """Started over, or rolled back: what is saved now is what the next start continues from."""
    checkpoints = _checkpoints(tmp_path, keep=3)
    _save_steps(checkpoints, [10, 20, 30])
    again = _checkpoints(tmp_path, resume=resume.format(folder=checkpoints.folder))
    _load(again)
    _save_steps(again, [11])
    assert _load(_checkpoints(tmp_path)).step == 11
    assert len(list(checkpoints.folder.glob("given_up_step_*"))) == 2


def test_full_disk_leaves_the_earlier_ones(tmp_path, monkeypatch):
    checkpoints = _checkpoints(tmp_path)
    _save_steps(checkpoints, [1])

    def full(self, folder):
        raise OSError(28, "No space left on device", str(folder / "rank_00000.safetensors"))

    monkeypatch.setattr(SmallEngine, "save", full)
    with pytest.raises(AgreedError, match="No space left on device"):
        _save_steps(checkpoints, [2])
    assert [path.name for path in checkpoints.folder.iterdir() if path.is_dir()] == ["step_000001"]
    assert _load(_checkpoints(tmp_path)).step == 1


def test_killed_at_any_moment_of_a_write(tmp_path):
    """A child dies by SIGKILL at its n-th disk operation while it saves step 2, for every n until it gets through."""
    subprocess.run([sys.executable, __file__, str(tmp_path)], check=True)  # forks from a process without threads
    folders = sorted(tmp_path.iterdir(), key=lambda path: int(path.name))
    assert len(folders) > 10
    for folder in folders:
        assert _load(_checkpoints(folder)).step in (1, 2)
        pointer = (folder / "checkpoints" / "latest").read_text()
        assert _load(_checkpoints(folder, resume=str(folder / "checkpoints" / pointer))).step in (1, 2)
    assert _load(_checkpoints(folders[0])).step == 1
    assert _load(_checkpoints(folders[-1])).step == 2


def _killed_at(moment: int, folder: Path) -> bool:
    """True when the child finished before its moment came."""
    child = os.fork()
    if child == 0:
        try:
            checkpoints = _checkpoints(folder)
            _save_steps(checkpoints, [1])
            _arm(moment)
            _save_steps(checkpoints, [2])
            os._exit(0)
        finally:
            os._exit(4)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, status
    return not os.WIFSIGNALED(status)


def _arm(moment: int) -> None:
    """Die before the moment-th call of anything that changes the disk."""
    calls = 0

    def deadly(function):
        def call(*args, **kwargs):
            nonlocal calls
            if calls == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            calls += 1
            return function(*args, **kwargs)

        return call

    os.fsync, shutil.rmtree, Path.rename = deadly(os.fsync), deadly(shutil.rmtree), deadly(Path.rename)
    Path.write_text, SmallEngine.save, Path.mkdir = (
        deadly(Path.write_text),
        deadly(SmallEngine.save),
        deadly(Path.mkdir),
    )


def test_progress_is_plain_json(tmp_path):
    checkpoints = _checkpoints(tmp_path)
    _save_steps(checkpoints, [1])
    saved = json.loads((checkpoints.folder / "step_000001" / "progress.json").read_text())
    assert saved["step"] == 1 and saved["prompts"] == {"position": 4} and "rank_00000.safetensors" in saved["sizes"]


if __name__ == "__main__":
    moment = 0
    while not _killed_at(moment, Path(sys.argv[1]) / str(moment)):
        moment += 1
