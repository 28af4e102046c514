"""A start with no step left to train says so before anything heavy starts."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from megadiff.checkpoint.checkpoints import Checkpoints
from megadiff.config.schema import Config
from megadiff.observe.events import Events
from megadiff.train.resume_point import check_resume_point, is_finished
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


def test_a_finished_run_is_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(folder, 24)
    check_resume_point(config)
    Events(folder / "a").write("run_finished", step=24)
    with caplog.at_level(logging.INFO):
        assert is_finished(config, one_rank_mesh())
    words = f"{folder}/a is finished: 24 of train.num_steps=24; for more set train.num_steps=48"
    assert words in caplog.text


@pytest.mark.parametrize("last", ["run_stopped", "run_resumed", None])
def test_a_run_that_did_not_say_so_is_built_and_verified(folder: Path, last: str | None) -> None:
    """Its last checkpoint may be torn where only its tensors tell."""
    events = Events(folder / "a")
    events.write("run_finished", step=12)
    if last:
        events.write(last, step=24)
    assert not is_finished(config_of(folder, 24), one_rank_mesh())


def test_steps_that_are_left_are_trained(folder: Path) -> None:
    for config in (
        config_of(folder, 25),
        config_of(folder, 10, resume="never"),
        config_of(folder, 10, name="new"),
        config_of(folder, 25, resume=str(folder / "a/checkpoints/step_000024"), name="new"),
    ):
        check_resume_point(config)
        assert not is_finished(config, one_rank_mesh())


def test_a_torn_checkpoint_finishes_nothing(folder: Path) -> None:
    Events(folder / "a").write("run_finished", step=24)
    (folder / "a/checkpoints/step_000024/rank_00000.safetensors").unlink()
    check_resume_point(config_of(folder, 10))
    assert not is_finished(config_of(folder, 24), one_rank_mesh())


@pytest.mark.parametrize(("name", "num_steps"), [("a", 10), ("new", 10), ("new", 24)])
def test_a_checkpoint_beyond_the_last_step_is_refused(
    folder: Path, name: str, num_steps: int
) -> None:
    checkpoint = folder / "a/checkpoints/step_000024"
    with pytest.raises(ValueError) as caught:
        check_resume_point(config_of(folder, num_steps, str(checkpoint), name))
    words = f"train.num_steps={num_steps}, but {checkpoint} is at step 24"
    assert words in str(caught.value)
    assert "train.num_steps=48" in str(caught.value)
    assert f"`megadiff convert {checkpoint} out`" in str(caught.value)

    config = config_of(folder, num_steps, str(checkpoint), name)
    config.lora.rank = 8
    with pytest.raises(ValueError, match="out --to merged`, then model.path=out"):
        check_resume_point(config)


def test_another_lora_is_refused_before_any_checkpoint_is_tried(tmp_path: Path) -> None:
    config = config_of(tmp_path, 24)
    config.lora.rank = 8
    config.lora.alpha = 16.0
    folder = saved(config, tmp_path)
    check_resume_point(config)

    config.lora.rank = 16
    words = (
        f"lora.rank=16, but {folder}/a/checkpoints/step_000024 was trained with lora.rank=8: set "
        "lora.rank=8 lora.alpha=16 to go on with it, or another run.name"
    )
    with pytest.raises(ValueError, match=words):
        check_resume_point(config)

    config.lora.rank = 8
    config.lora.alpha = 0.0
    with pytest.raises(ValueError, match=r"lora.alpha=0, but .* was trained with lora.alpha=16"):
        check_resume_point(config)
    config.checkpoint.resume = f"{folder}/a/checkpoints/step_000024"
    with pytest.raises(ValueError, match="or checkpoint.resume=auto and another run.name"):
        check_resume_point(config)
    config.checkpoint.resume = "never"
    check_resume_point(config)


def test_alpha_0_is_the_rank(tmp_path: Path) -> None:
    config = config_of(tmp_path, 24)
    config.lora.rank = 8
    saved(config, tmp_path)
    config.lora.alpha = 8.0
    check_resume_point(config)
