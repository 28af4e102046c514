"""docs/algorithms.md names every algorithm, and its counts of code hold."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

from megadiff.algorithms import ALGORITHMS, build_algorithm
from megadiff.config.algorithm import AlgorithmConfig

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "megadiff/algorithms"
PAGE = (ROOT / "docs/algorithms.md").read_text()


def num_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_the_table_has_every_algorithm_with_its_rows_and_needs() -> None:
    first = PAGE.partition("## ")[0]  # later tables are of settings and results
    table = re.findall(r"^\| `(\w+)` \| [^|]+ \| (\w+) \| [^|]+ \| ([^|]+) \|", first, re.MULTILINE)
    assert [name for name, _, _ in table] == list(ALGORITHMS)
    for name, rows, needs in table:
        algorithm = build_algorithm(AlgorithmConfig(name=name))
        assert algorithm.rows == rows
        # those of settings that are off by default stand after the others
        assert set(re.findall(r"\w+", needs.split(",")[0].split(";")[0])) == algorithm.needs


def test_the_counts_of_lines() -> None:
    counts = []
    for name in ALGORITHMS:
        loss = build_algorithm(AlgorithmConfig(name=name)).loss
        function = loss.func if isinstance(loss, partial) else loss
        counts.append(num_lines(FOLDER / f"{function.__module__.rpartition('.')[2]}.py"))
    low, high = re.search(r"a loss in `megadiff/algorithms/` \| (\d+) to (\d+) \|", PAGE).groups()
    assert int(low) <= min(counts) <= max(counts) <= int(high) <= 60
    assert sum(map(num_lines, FOLDER.glob("*.py"))) <= 690
