"""Checkpoints are whole or not there, whatever moment the process dies at."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megadiff.checkpoint.run_folders import whole_looking
from megadiff.parallel.collectives import AgreedError
from megadiff.tensors.snapshot import Snapshot
from megadiff.types import Progress
from tests.unit.checkpoint.runs import Trained, loaded, run_of, save_steps

ROOT = Path(__file__).parents[3]


def test_round_trip_keeps_the_newest(tmp_path):
    checkpoints = run_of(tmp_path)
    assert loaded(checkpoints) == Progress()
    save_steps(checkpoints, 1, 2, 3)
    assert [path.name for path in whole_looking(checkpoints.folder)] == [
        "step_000002",
        "step_000003",
    ]
    assert (checkpoints.folder / "latest").read_text() == "step_000003"
    assert loaded(run_of(tmp_path)) == Progress(step=3, prompts={"position": 12})
    assert loaded(run_of(tmp_path, resume="never")) == Progress()
    assert loaded(run_of(tmp_path, resume=str(checkpoints.folder / "step_000002"))).step == 2


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
        (
            lambda folder: (folder / "rank_00000.safetensors").unlink(),
            "rank_00000.safetensors is missing",
        ),
        (lambda folder: (folder / "progress.json").unlink(), "progress.json is missing"),
        (lambda folder: (folder / "progress.json").write_text("{"), "progress.json is corrupt"),
    ],
)
def test_a_damaged_one_is_named_and_the_one_before_is_used(tmp_path, caplog, harm, text):
    checkpoints = run_of(tmp_path)
    save_steps(checkpoints, 1, 2)
    newest = checkpoints.folder / "step_000002"
    harm(newest)
    assert loaded(run_of(tmp_path)).step == 1
    assert "step_000002 does not load" in caplog.text and text in caplog.text
    with pytest.raises(AgreedError, match="no checkpoint of"):
        loaded(run_of(tmp_path, resume=str(newest)))
    harm(checkpoints.folder / "step_000001")
    with pytest.raises(
        AgreedError, match="set checkpoint.resume=never"
    ):  # never silently from the start
        loaded(run_of(tmp_path))


@pytest.mark.parametrize("resume", ["never", "{folder}/step_000010"])
def test_checkpoints_of_a_history_that_was_given_up_do_not_win(tmp_path, resume):
    """Started over, or rolled back: what is saved now is what the next start continues from."""
    checkpoints = run_of(tmp_path, keep=3)
    save_steps(checkpoints, 10, 20, 30)
    again = run_of(tmp_path, resume=resume.format(folder=checkpoints.folder))
    loaded(again)
    save_steps(again, 11)
    assert loaded(run_of(tmp_path)).step == 11
    assert len(list(checkpoints.folder.glob("given_up_step_*"))) == 2


def test_a_users_copy_is_neither_resumed_from_nor_removed(tmp_path):
    checkpoints = run_of(tmp_path, keep=1)
    save_steps(checkpoints, 10)
    for name in ("step_000010_best", "step_000030_before_lr_change", "step_final"):
        shutil.copytree(checkpoints.folder / "step_000010", checkpoints.folder / name)
    save_steps(checkpoints, 20)
    assert loaded(run_of(tmp_path)).step == 20
    assert sorted(path.name for path in checkpoints.folder.glob("step_*")) == [
        "step_000010_best",
        "step_000020",
        "step_000030_before_lr_change",
        "step_final",
    ]


def test_killed_at_any_moment_of_a_write(tmp_path):
    """A child dies by SIGKILL at its n-th disk operation while it saves step 2, for every n until
    it gets through.
    """
    subprocess.run(
        [sys.executable, "-m", __name__, str(tmp_path)], check=True, cwd=ROOT
    )  # forks from a process without threads
    folders = sorted(tmp_path.iterdir(), key=lambda path: int(path.name))
    assert len(folders) > 10
    for folder in folders:
        assert loaded(run_of(folder)).step in (1, 2)
        pointer = (folder / "checkpoints" / "latest").read_text()
        assert loaded(run_of(folder, resume=str(folder / "checkpoints" / pointer))).step in (
            1,
            2,
        )
    assert loaded(run_of(folders[0])).step == 1
    assert loaded(run_of(folders[-1])).step == 2


def _killed_at(moment: int, folder: Path) -> bool:
    """True when the child finished before its moment came."""
    child = os.fork()
    if child == 0:
        try:
            checkpoints = run_of(folder)
            save_steps(checkpoints, 1)
            _arm(moment)
            save_steps(checkpoints, 2)
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

    os.fsync, shutil.rmtree, Path.rename = (
        deadly(os.fsync),
        deadly(shutil.rmtree),
        deadly(Path.rename),
    )
    Path.write_text, Path.write_bytes = deadly(Path.write_text), deadly(Path.write_bytes)
    Snapshot.write, Path.mkdir = deadly(Snapshot.write), deadly(Path.mkdir)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("step_000009", "names step_000009, which is not there; the newest is step_000002"),
        ("stem_000002", "is corrupt, it holds 'stem_000002'; remove it"),
        ("", "is corrupt"),
    ],
)
def test_a_newest_one_that_went_missing_is_noticed(tmp_path, content, text):
    checkpoints = run_of(tmp_path)
    save_steps(checkpoints, 1, 2)
    (checkpoints.folder / "latest").write_text(content)
    with pytest.raises(AgreedError, match=text):
        loaded(run_of(tmp_path))
    assert loaded(run_of(tmp_path, resume=str(checkpoints.folder / "step_000001"))).step == 1
    (checkpoints.folder / "latest").unlink()
    assert loaded(run_of(tmp_path)).step == 2


def test_killed_before_latest_moved_goes_on_from_what_is_there(tmp_path):
    """`latest` is older than the newest, or names one of a history that was given up just now."""
    checkpoints = run_of(tmp_path)
    save_steps(checkpoints, 1, 2)
    (checkpoints.folder / "latest").write_text("step_000001")
    assert loaded(run_of(tmp_path)).step == 2
    (checkpoints.folder / "latest").write_text("step_000002")
    given_up = checkpoints.folder / "given_up_step_000002_123"
    (checkpoints.folder / "step_000002").rename(given_up)
    assert loaded(run_of(tmp_path)).step == 1


OURS = {"path": "/models/ours", "fingerprint": "a1" * 16}
OTHER = {"path": "/models/other", "fingerprint": "b2" * 16}


def test_a_checkpoint_over_another_base_is_refused_unless_it_is_meant(tmp_path, caplog):
    first = run_of(tmp_path, base=OURS)
    engine = Trained()
    first.save(engine, first.load(engine, lambda _: None))
    first.settle()
    moved = OURS | {"path": "/elsewhere"}
    assert run_of(tmp_path, base=moved).load(engine, lambda _: None).base == moved
    assert run_of(tmp_path).load(engine, lambda _: None).base == {}  # needs none
    with pytest.raises(AgreedError) as caught:
        run_of(tmp_path, base=OTHER).load(engine, lambda _: None)
    for word in (*OURS.values(), *OTHER.values(), "checkpoint.accept_changes=true"):
        assert word in str(caught.value)
    meant = run_of(tmp_path, base=OTHER, accept_changes=True)
    progress = meant.load(engine, lambda _: None)
    assert progress.base == OTHER and "goes on over those" in caplog.text
    meant.save(engine, progress)  # from here on the other one is the base
    meant.settle()
    assert run_of(tmp_path, base=OTHER).load(engine, lambda _: None).base == OTHER


def test_progress_is_plain_json(tmp_path):
    checkpoints = run_of(tmp_path)
    save_steps(checkpoints, 1)
    saved = json.loads((checkpoints.folder / "step_000001" / "progress.json").read_text())
    assert (
        saved["step"] == 1
        and saved["prompts"] == {"position": 4}
        and "rank_00000.safetensors" in saved["sizes"]
    )


if __name__ == "__main__":
    moment = 0
    while not _killed_at(moment, Path(sys.argv[1]) / str(moment)):
        moment += 1
