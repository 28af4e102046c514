"""A family in a file of the user's folder trains, with a replica that finds it there too."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from megadiff.rollout.spec import read_spec
from tests.e2e.conftest import GATED, Result, Trainer
from tests.e2e.servers import ENVIRONMENT, ROOT

FAMILY = "my_family:StaticShiftAdapter"


def test_a_family_of_ones_own_trains(tiny_model: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    change(model / "model_index.json", _class_name="StaticShiftPipeline")
    change(model / "scheduler" / "scheduler_config.json", shift=3.0, use_dynamic_shifting=False)
    shutil.copy(ROOT / "examples" / "static_shift.py", tmp_path / "my_family.py")

    trainer = Trainer(tmp_path, model)
    command = trainer.command(f"model.family={FAMILY}", "train.num_steps=2", GATED)
    command = [sys.executable, "-m", "megadiff.cli.main", "train", *command[3:]]
    done = subprocess.run(
        command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]

    result = Result(code=0, stderr=done.stderr, folder=tmp_path / "run")
    assert [row["step"] for row in result.rows] == [1, 2]
    # the gate compares schedules: Qwen-Image's would differ by 0.2
    assert result.rows[0]["parity/log_prob_gap_max"] < 1e-6
    assert read_spec(result.folder / "logs" / "replica_0.json").family == FAMILY


def change(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
