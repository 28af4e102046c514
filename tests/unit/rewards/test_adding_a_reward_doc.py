from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_page_works_as_written(tmp_path: Path) -> None:
    page = (ROOT / "docs/adding_a_reward.md").read_text()
    blocks = re.findall(r"```(python|yaml)\n(.*?)```", page, re.DOTALL)
    for language, code in blocks:
        name = "rewards.yaml" if language == "yaml" else re.match(r"# (\w+\.py)\n", code).group(1)
        (tmp_path / name).write_text(code)
    ran = subprocess.run(
        [sys.executable, "try_my_rewards.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    promised = re.search(r"It prints `(.*)` and `(.*)`\.", page).groups()
    assert ran.stdout.splitlines() == list(promised)
