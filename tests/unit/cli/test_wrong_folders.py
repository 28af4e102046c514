"""A folder of another kind than the command takes is told as what it is, with what to give."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megadiff.cli.evaluate_subject import config_of
from megadiff.cli.main import main

ROOT = Path(__file__).parents[3]


def test_check_tells_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("seed: 1")
    assert main(["check", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path} is a run" in error and f"megadiff convert {tmp_path} OUT" in error


@pytest.mark.parametrize("file", ["pytorch_lora_weights.safetensors", "adapter_config.json"])
def test_evaluate_tells_a_lora(tmp_path: Path, file: str) -> None:
    (tmp_path / file).touch()
    with pytest.raises(ValueError, match="is a LoRA, .* --to merged --base MODEL`, and give OUT"):
        config_of(tmp_path, [])


def test_a_pipeline_may_have_a_lora_beside_it(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(ROOT / "assets" / "shapes", folder)
    (folder / "pytorch_lora_weights.safetensors").touch()
    assert config_of(folder, []).model.path == str(folder)


def test_evaluate_tells_a_checkpoint_and_its_run(tmp_path: Path) -> None:
    checkpoint = tmp_path / "mine/checkpoints/step_000015"
    checkpoint.mkdir(parents=True)
    (checkpoint / "progress.json").touch()
    (checkpoint / "config.yaml").touch()
    with pytest.raises(ValueError, match=f"is a checkpoint: give the run, {tmp_path}/mine, "):
        config_of(checkpoint, [])
