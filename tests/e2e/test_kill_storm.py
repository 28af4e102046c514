"""Random ends of a run, and of its replicas: nothing is lost, left running, or hangs."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_three_random_ends(tmp_path):
    """With this seed they are of a run's own replica, of torchrun, and of a rank alone."""
    seed = "2"
    command = [
        sys.executable,
        str(ROOT / "tools" / "kill_storm.py"),
        "--count=3",
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
    assert summary.startswith(f"3 trials, seed {seed}: 0 finished steps lost"), summary


def test_three_random_faults_of_replicas_change_no_bit(tmp_path, tiny_model):
    """With this seed a connection breaks (as root), an answer is late, and a replica is killed."""
    command = [sys.executable, str(ROOT / "tools" / "bench_faults.py"), "--faults=3", "--seed=50"]
    done = subprocess.run(
        [*command, f"--model={tiny_model}", f"--folder={tmp_path}"],
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "3 faults: 0 of " in done.stdout and "0 steps missing; 0 processes left" in done.stdout
    done_kinds = re.search(r"faults done: (.*)", done.stdout)
    assert done_kinds and done_kinds[1].count(" 1") == 3, done.stdout
    log = (tmp_path / "disturbed.log").read_text()
    assert re.search(r"is lost: replica_\d \(pid \d+\) was killed by SIGKILL; the end of", log)
    assert re.search(r"is started again \(\d of rollout.max_restarts=30 in a row\)", log)
    events = (tmp_path / "disturbed" / "events.jsonl").read_text()
    # whether a call or a push was hit is a matter of timing
    assert "replica_restarted" in events
