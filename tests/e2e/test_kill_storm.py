"""Twelve random ends of a run: no finished step is lost, nothing is left running, nothing hangs."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_twelve_random_ends(tmp_path):
    seed = "11"
    command = [
        sys.executable,
        str(ROOT / "tools" / "kill_storm.py"),
        "--count=12",
        f"--seed={seed}",
    ]
    environment = {key: value for key, value in os.environ.items() if key != "MEGADIFF_KILL_STORM"}
    done = subprocess.run(
        [*command, f"--folder={tmp_path}"],
        capture_output=True,
        text=True,
        timeout=1200,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    summary = done.stdout.splitlines()[-1]
    assert summary.startswith(f"12 trials, seed {seed}: 0 finished steps lost"), summary
