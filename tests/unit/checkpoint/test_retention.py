"""What follows a checkpoint's rename ends no run and deletes nothing that another rank writes."""

import errno
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from megadiff.checkpoint import checkpoints, retention
from megadiff.checkpoint.retention import check_latest, move_latest, put_away_other_history
from megadiff.observe.step_folders import step_folder, step_folders
from megadiff.parallel.plan import ParallelPlan
from megadiff.train.batch_files import batch_file, batch_files
from megadiff.train.build import resume
from tests.unit.checkpoint.runs import Trained, loaded, names_in, run_of, save_steps


def test_an_old_one_that_cannot_be_removed_ends_no_run(tmp_path, monkeypatch, caplog):
    """As over NFS, where a file of it is open on this host."""
    stock = shutil.rmtree

    def rmtree(folder, *, ignore_errors=False):
        if "step_000001" not in Path(folder).name:
            stock(folder, ignore_errors=ignore_errors)
        elif not ignore_errors:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(folder))

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    run = run_of(tmp_path, keep=2)
    for step in (1, 2, 3, 4):
        save_steps(run, step)
        assert run.saved_step == step
        assert (run.folder / "latest").read_text() == f"step_{step:06d}"
    # What may be half of a checkpoint has the name of none.
    assert names_in(run) == [".old_step_000001", "step_000003", "step_000004"]
    assert f"{run.folder / '.old_step_000001'} cannot be removed" in caplog.text
    assert loaded(run_of(tmp_path)).step == 4


@pytest.mark.parametrize("refused", [".writing_latest", "checkpoints"])
def test_a_disk_that_is_full_after_the_rename_ends_no_run(tmp_path, monkeypatch, caplog, refused):
    """`refused`: what cannot be brought to the disk."""
    stock = checkpoints.sync_entry

    def sync_entry(path):
        if path.name == refused:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        stock(path)

    monkeypatch.setattr(checkpoints, "sync_entry", sync_entry)
    monkeypatch.setattr(retention, "sync_entry", sync_entry)
    run = run_of(tmp_path, keep=2)
    for step in (1, 2):
        save_steps(run, step)
        assert run.saved_step == step
    assert names_in(run) == ["step_000001", "step_000002"]
    assert "step_000002" in caplog.text and "No space left on device" in caplog.text
    assert loaded(run_of(tmp_path)).step == 2


def test_completing_one_leaves_the_folder_that_another_rank_rescues_into(tmp_path):
    """Rank 0 may be removing old ones while others have begun, which it does not know of."""
    run = run_of(tmp_path, keep=2)
    other_rank = run_of(tmp_path)
    rescued = other_rank.begin_rescue(31)
    batch_file(rescued, 1).write_bytes(b"samples")
    save_steps(run, 30)
    assert batch_files(rescued) == [batch_file(rescued, 1)]
    assert run.begin_rescue(31) == rescued


def test_a_rescue_takes_no_files_of_an_earlier_attempt(tmp_path):
    """That one was killed with samples written and weights not, at the same step."""
    save_steps(run_of(tmp_path / "run"), 29)
    earlier = run_of(tmp_path / "run")
    batch_file(earlier.begin_rescue(30), 1).write_bytes(b"of another history")
    (earlier.folder / ".old_step_000010").mkdir()

    config = earlier.config
    config.run.dir = str(tmp_path)
    config.run.name = "run"
    engine = SimpleNamespace(
        config=config,
        adapter=SimpleNamespace(plan=ParallelPlan(rules={})),
        mesh=earlier.mesh,
        load=Trained().load,
    )
    data = SimpleNamespace(load_state=lambda state, *, accept_changes: None)
    run, progress = resume(engine, data)
    assert progress.step == 29 and names_in(run) == ["step_000029"]
    assert batch_files(run.begin_rescue(30)) == []


def test_steps_are_compared_as_numbers(tmp_path):
    """From step 1,000,000 on names no longer sort by step."""
    for step in (999_999, 1_000_000):
        step_folder(tmp_path, step).mkdir()
    put_away_other_history(tmp_path, 1_000_001)
    assert [step for step, _ in step_folders(tmp_path)] == [999_999, 1_000_000]

    move_latest(tmp_path, "step_1000000")
    check_latest(tmp_path)
    step_folder(tmp_path, 1_000_000).rmdir()
    with pytest.raises(ValueError, match="names step_1000000, which is not there"):
        check_latest(tmp_path)
