"""`megadiff train` of a job that its attempts ask to stop, each in another stage of a step.

ASK_IN: the stages, the first attempt's first. ASK_FOLDER: the run's. PAUSE_S: of the first attempt
in its second step, in which it asks nobody.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from megadiff.cli.main import entry
from tests.e2e.asking import ask_in
from tests.slurm.cluster import wait_for


def ask() -> None:
    """Ask as a user does, and wait until the batch script has passed it on."""
    batch = ("--batch", "--signal=USR1", os.environ["SLURM_JOB_ID"])
    subprocess.run(["scancel", *batch], check=True)
    wait_for(Path(os.environ["ASK_FOLDER"], "stop").exists, what="stop")


if __name__ == "__main__":
    stages = os.environ.get("ASK_IN", "").split()
    attempt = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    if attempt < len(stages):
        ask_in(stages[attempt], ask)
    if attempt == 0:
        pause_s = float(os.environ.get("PAUSE_S", "0"))
        ask_in("reward", lambda: None, pause_s=pause_s, at_call=2)
    entry()
