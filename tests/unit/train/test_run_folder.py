"""A run.dir that cannot be written is told with the key, before the run and in a dry run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megadiff.config.schema import Config
from megadiff.train.run import check_run_folder, make_run_folder


def config_of(folder: str) -> Config:
    config = Config()
    config.run.dir = folder
    config.run.name = "a"
    return config


def test_a_folder_that_nobody_can_make() -> None:
    words = (
        r"run\.dir=/proc/x: /proc/x/a cannot be written \(No such .*\); set run\.dir to a folder"
    )
    with pytest.raises(ValueError, match=words):
        make_run_folder(config_of("/proc/x"))


def test_it_is_told_without_making_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_run_folder(config_of(str(tmp_path / "new" / "runs")))
    assert not list(tmp_path.iterdir())

    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=f"{tmp_path}/file is no folder"):
        check_run_folder(config_of(str(tmp_path / "file" / "runs")))

    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ValueError, match=f"{tmp_path} is not yours to write"):
        check_run_folder(config_of(str(tmp_path / "runs")))
