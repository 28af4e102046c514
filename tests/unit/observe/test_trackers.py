import json
import logging
import math
import os
import signal
import subprocess
import sys

import pytest
from synthetic_evaluation import evaluation
from synthetic_run import metrics_of, samples_of

from megadiff.observe.evaluation import evaluation_folder, evaluation_folders, write_evaluation
from megadiff.observe.metrics import read_rows, verdict
from megadiff.observe.step_folders import step_folders
from megadiff.observe.trackers import Trackers, build_trackers, check_trackers


def test_each_step_is_one_line_on_disk_as_soon_as_it_is_logged(tmp_path):
    with build_trackers([], tmp_path / "run", {}) as trackers:
        for step in (1, 2):
            trackers.log(step, {"reward/mean": step / 2})
            lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
            assert len(lines) == step and json.loads(lines[-1]) == {
                "step": step,
                "reward/mean": step / 2,
            }


def test_nan_and_infinity_are_null_with_a_warning(tmp_path, caplog):
    with build_trackers([], tmp_path, {}) as trackers, caplog.at_level(logging.WARNING):
        trackers.log(1, {"loss/policy": math.nan, "a/b": -math.inf, "reward/mean": 1.0})
    row = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert row == {"step": 1, "loss/policy": None, "a/b": None, "reward/mean": 1.0}
    assert "step 1: loss/policy, a/b not finite" in caplog.text


def test_resume_keeps_the_lines_up_to_its_step_byte_for_byte(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with build_trackers([], tmp_path, {}) as trackers:
        for step in range(1, 6):
            trackers.log(step, {"reward/mean": step / 3})
            trackers.images(step, samples_of(step, num_steps=5, size=8))
    kept = path.read_bytes().splitlines(keepends=True)[:3]
    with path.open("a") as file:
        file.write('{"step": 6, "rew')
    with build_trackers([], tmp_path, {}, resume_step=3) as trackers:
        assert path.read_bytes() == b"".join(kept)
        assert [step for step, _ in step_folders(tmp_path / "samples")] == [1, 2, 3]
        trackers.log(4, {"reward/mean": 9.0})
    assert [row["step"] for row in read_rows(path)] == [1, 2, 3, 4]


def test_a_torn_line_never_swallows_the_first_line_after_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 1, "a/x": 1.0}\n{"step": 2, "a/x": 2.0}'
    )  # whole, but for its end of line
    with build_trackers([], tmp_path, {}, resume_step=2) as trackers:
        trackers.log(3, {"a/x": 3.0})
    assert [row["step"] for row in read_rows(path)] == [1, 3]


def test_a_step_is_logged_once_and_keys_are_checked(tmp_path):
    with build_trackers([], tmp_path, {}, resume_step=4) as trackers:
        with pytest.raises(ValueError, match="step=4 <= 4"):
            trackers.log(4, {"a/x": 1.0})
        with pytest.raises(ValueError, match="'reward' is not area/quantity_unit"):
            trackers.log(5, {"reward": 1.0})
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_unknown_trackers_are_refused_with_the_valid_ones(tmp_path):
    with pytest.raises(
        ValueError, match="unknown tensorbord; the trackers are jsonl, tensorboard, wandb"
    ):
        build_trackers(["tensorbord"], tmp_path / "run", {})
    assert not (tmp_path / "run").exists()


def test_a_missing_package_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"pip install 'megadiff\[wandb\]'"):
        build_trackers(["wandb"], tmp_path, {})
    with pytest.raises(ValueError, match=r"pip install 'megadiff\[wandb\]'"):
        check_trackers(["wandb"])  # which --dry-run and the doctor call


def test_ranks_that_do_not_log_write_nothing():
    trackers = Trackers(())
    trackers.log(1, {"a/x": 1.0})
    trackers.images(1, samples_of(1, num_steps=1, size=8))
    trackers.close()


def tensorboard_rewards(folder):
    module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = module.EventAccumulator(str(folder / "tensorboard")).Reload()
    return [(event.step, event.value) for event in events.Scalars("reward/mean")]


def test_tensorboard_holds_scalars_and_forgets_what_resume_repeats(tmp_path):
    with build_trackers(["tensorboard"], tmp_path, {}) as trackers:
        for step in (1, 2, 3):
            trackers.log(step, metrics_of(step, num_steps=3) | {"loss/policy": math.nan})
    with build_trackers(["tensorboard"], tmp_path, {}, resume_step=2) as trackers:
        trackers.log(3, {"reward/mean": 0.5})
    rewards = tensorboard_rewards(tmp_path)
    assert [step for step, _ in rewards] == [1, 2, 3] and rewards[-1] == (3, 0.5)


def test_tensorboard_forgets_an_attempt_that_starts_over(tmp_path):
    for num_steps, reward in ((5, 1.0), (2, 0.5)):
        with build_trackers(["tensorboard"], tmp_path, {}) as trackers:
            for step in range(num_steps):
                trackers.log(step, {"reward/mean": reward})
    assert tensorboard_rewards(tmp_path) == [(0, 0.5), (1, 0.5)]


def test_a_killed_run_keeps_every_line_that_it_logged(tmp_path):
    code = (
        "import os, pathlib, signal; from megadiff.observe.trackers import build_trackers\n"
        f"trackers = build_trackers([], pathlib.Path({str(tmp_path)!r}), {{}})\n"
        "for step in range(1, 51): trackers.log(step, {'reward/mean': 1.0})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert killed.returncode == -signal.SIGKILL
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == list(range(1, 51))


def test_the_evaluation_before_the_first_step_is_a_line_of_its_own_and_goes_when_a_run_starts_over(
    tmp_path,
):
    path = tmp_path / "metrics.jsonl"
    with build_trackers(["tensorboard"], tmp_path, {}) as trackers:
        trackers.log(0, {"eval/mean": 0.4})
        trackers.log(1, {"reward/mean": 0.5})
        write_evaluation(evaluation_folder(tmp_path, 0), evaluation(0.4), {})
        with pytest.raises(ValueError, match="step=0 <= 1"):
            trackers.log(0, {"eval/mean": 0.4})
    rows = read_rows(path)
    assert rows == [{"step": 0, "eval/mean": 0.4}, {"step": 1, "reward/mean": 0.5}]
    assert verdict(rows).first == 0.5
    with build_trackers([], tmp_path, {}, resume_step=1):
        assert read_rows(path) == rows and [step for step, _ in evaluation_folders(tmp_path)] == [0]
    with build_trackers([], tmp_path, {}) as trackers:
        assert read_rows(path) == [] and evaluation_folders(tmp_path) == []
        trackers.log(0, {"eval/mean": 0.4})
