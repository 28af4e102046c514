from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megadiff.rewards.base import RewardSample
from megadiff.types import Prompt

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


def test_its_reward_of_a_column_scores_rows_with_it_and_refuses_others(tmp_path: Path) -> None:
    page = (ROOT / "docs/adding_a_reward.md").read_text()
    (code,) = re.findall(r"```python\n(# row_reward.py\n.*?)```", page, re.DOTALL)
    (tmp_path / "row_reward.py").write_text(code)
    reward = runpy.run_path(str(tmp_path / "row_reward.py"))["RowBrightness"]()

    white = np.full((1, 8, 8, 3), 255, np.uint8)
    prompt = Prompt(text="a white wall", id="0", fields={"brightness": 0.9})
    reward.validate([prompt])
    sample = RewardSample(pixels=white, prompt=prompt, sample_index=0)
    assert reward.score([sample]) == pytest.approx([0.9])
    with pytest.raises(ValueError, match="'a wall': brightness=None is no number"):
        reward.validate([Prompt(text="a wall", id="1")])
