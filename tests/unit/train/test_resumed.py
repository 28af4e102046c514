"""A resume says which settings are others than those of its checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from megadiff.checkpoint.run_folders import CONFIG
from megadiff.config.load import load_config, save_config
from megadiff.config.schema import Config
from megadiff.observe.events import Events, read_events
from megadiff.train.resumed import record_config, tell_begin


def config_of(*overrides: str) -> Config:
    needed = ["run.name=a", "model.path=m", "train.prompts_per_step=4", "rollout.height=64"]
    needed += ["rollout.width=64", "train.num_steps=30", "optim.lr=4e-5", "reward.hue.type=color"]
    return load_config([*needed, *overrides])


def resume_text(folder: Path, *overrides: str) -> str:
    save_config(config_of(), folder / CONFIG)
    tell_begin(config_of(*overrides), folder, step=7, events=Events(folder))
    return read_events(folder)[-1].text


def test_log_and_event_tell_both_values(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        text = resume_text(tmp_path, "optim.lr=1e-4", "train.num_steps=24")
    assert text == "with other settings: train.num_steps 30 → 24, optim.lr 4e-05 → 0.0001"
    assert f"resumed at step 7 {text}" in caplog.text
    assert [record.levelname for record in caplog.records] == ["INFO"]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("reward.hue.weight=2", "reward.hue.weight 1.0 → 2.0"),
        ("reward.size.type=jpeg_size", "reward.size.type none → jpeg_size"),
        ("algorithm.group_size=4", "algorithm.group_size 1 → 4"),
        ("rollout.eta=0.5", "rollout.eta 0.7 → 0.5"),
    ],
)
def test_another_reward_algorithm_or_sampling_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, override: str, words: str
) -> None:
    assert words in resume_text(tmp_path, override)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_what_trains_nothing_else_is_not_told(tmp_path: Path) -> None:
    keys = ["run.name=b", "checkpoint.every=3", "observe.profile_steps=[9]", "track=[]"]
    assert resume_text(tmp_path, *keys) == ""


def test_a_checkpoint_without_a_config_is_resumed_all_the_same(tmp_path: Path) -> None:
    tell_begin(config_of(), tmp_path, step=7, events=Events(tmp_path))
    (event,) = read_events(tmp_path)
    assert (event.kind, event.text) == ("run_resumed", "")


def test_a_start_with_no_step_left_leaves_the_config_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    record_config(config_of(), tmp_path, step=30)
    assert "lr: 4.0e-05" in path.read_text()
    record_config(config_of("optim.lr=1e-4"), tmp_path, step=30)
    assert "lr: 4.0e-05" in path.read_text()
    record_config(config_of("optim.lr=1e-4"), tmp_path, step=29)
    assert "lr: 0.0001" in path.read_text()
