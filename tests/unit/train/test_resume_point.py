"""A start with no step left to train says so before anything heavy starts."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from megadiff.checkpoint.checkpoints import Checkpoints
from megadiff.config.schema import Config
from megadiff.observe.events import Events, read_events
from megadiff.train.resume_point import check_num_steps, check_saved_lora, is_finished
from megadiff.types import Progress
from tests.meshes import one_rank_mesh


def config_of(folder: Path, num_steps: int, resume: str = "auto", name: str = "a") -> Config:
    config = Config()
    config.run.dir = str(folder)
    config.run.name = name
    config.train.num_steps = num_steps
    config.checkpoint.resume = resume
    return config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """runs/a, with a checkpoint of step 24."""
    return saved(config_of(tmp_path, 24), tmp_path)


def saved(config: Config, tmp_path: Path) -> Path:
    """Write a checkpoint of step 24 into the run's folder."""
    checkpoints = Checkpoints(tmp_path / "a", config, one_rank_mesh())
    aside = checkpoints.begin_rescue(24)
    (aside / "rank_00000.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    checkpoints.complete(aside, Progress(step=24))
    return tmp_path


def test_a_finished_run_is_told_and_its_event_completed(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(folder, 24)
    Events(folder / "a").write("run_stopped", step=24)
    check_num_steps(config)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert is_finished(config, one_rank_mesh())
    words = f"{folder}/a is finished: 24 of train.num_steps=24; for more set train.num_steps=48"
    assert words in caplog.text
    assert [event.kind for event in read_events(folder / "a")] == ["run_stopped", "run_finished"]


def test_steps_that_are_left_are_trained(folder: Path) -> None:
    for config in (
        config_of(folder, 25),
        config_of(folder, 10, resume="never"),
        config_of(folder, 10, name="new"),
        config_of(folder, 25, resume=str(folder / "a/checkpoints/step_000024"), name="new"),
    ):
        check_num_steps(config)
        assert not is_finished(config, one_rank_mesh())


def test_a_torn_checkpoint_finishes_nothing(folder: Path) -> None:
    (folder / "a/checkpoints/step_000024/rank_00000.safetensors").unlink()
    check_num_steps(config_of(folder, 10))
    assert not is_finished(config_of(folder, 24), one_rank_mesh())


@pytest.mark.parametrize(("name", "num_steps"), [("a", 10), ("new", 10), ("new", 24)])
def test_a_checkpoint_beyond_the_last_step_is_refused(
    folder: Path, name: str, num_steps: int
) -> None:
    checkpoint = folder / "a/checkpoints/step_000024"
    with pytest.raises(ValueError) as caught:
        check_num_steps(config_of(folder, num_steps, str(checkpoint), name))
    words = f"train.num_steps={num_steps}, but {checkpoint} is at step 24"
    assert words in str(caught.value)
    assert "train.num_steps=48" in str(caught.value)
    assert f"`megadiff convert {checkpoint} out`" in str(caught.value)


def test_another_lora_is_refused_before_any_checkpoint_is_tried(tmp_path: Path) -> None:
    config = config_of(tmp_path, 24)
    config.lora.rank = 8
    config.lora.alpha = 16.0
    folder = saved(config, tmp_path)
    check_saved_lora(config)

    config.lora.rank = 16
    words = (
        f"lora.rank=16, but {folder}/a/checkpoints/step_000024 was trained with lora.rank=8: set "
        "lora.rank=8 lora.alpha=16 to go on with it, or another run.name"
    )
    with pytest.raises(ValueError, match=words):
        check_saved_lora(config)

    config.lora.rank = 8
    config.lora.alpha = 0.0
    with pytest.raises(ValueError, match=r"lora.alpha=0, but .* was trained with lora.alpha=16"):
        check_saved_lora(config)
    config.checkpoint.resume = "never"
    check_saved_lora(config)


def test_alpha_0_is_the_rank(tmp_path: Path) -> None:
    config = config_of(tmp_path, 24)
    config.lora.rank = 8
    saved(config, tmp_path)
    config.lora.alpha = 8.0
    check_saved_lora(config)
