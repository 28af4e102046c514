"""The checkpoint benchmark as it is called, on about 10 M parameters."""

from __future__ import annotations

import json
import os
from pathlib import Path

import bench_checkpoint
import pytest

from tests.distributed.ranks import run_command


@pytest.mark.slow
def test_both_ways_are_measured(tmp_path: Path) -> None:
    arguments = ["--params=1e6", "--repeat=1", f"--folder={tmp_path}"]
    done = run_command(
        bench_checkpoint.main, arguments, folder=tmp_path, environment=dict(os.environ)
    )
    assert done.code == 0, done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    assert 0.05 < line["gib"] < 0.5
    assert line["in_line_s"] > 0 and line["background_s"] > 0 and line["update_s"] > 0
    assert line["written_s"] > line["background_s"]
    assert not list(tmp_path.iterdir())
