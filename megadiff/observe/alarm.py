"""Warn in the log, while a run goes on, that its reward may be exploited."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megadiff.observe.hacking import signs
from megadiff.observe.heldout import compare_ends
from megadiff.observe.metrics import Rows
from megadiff.observe.tracker import Tracker

logger = logging.getLogger(__name__)
ROWS_PER_LOOK = 100


class Alarm(Tracker):
    """Write one WARNING per kind of sign, when it begins; a tracker that writes nothing else.

    rows: logged so far. A resumed run compares with its true start, and repeats once, in its own
    log, what still holds.
    """

    def __init__(self, run_folder: Path, *, config: Mapping[str, Any], rows: Rows) -> None:
        self._run_folder = run_folder
        self._config = config
        self._rows = list(rows)
        self._heldout = compare_ends(run_folder)
        self._said: set[str] = set()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._rows.append({"step": step, **metrics})
        # Only then has the folder another evaluation to read.
        has_evaluation = any(key.startswith("eval/") for key in metrics)
        if has_evaluation:
            self._heldout = compare_ends(self._run_folder)
        # All rows are looked at: in a run of thousands of steps not in every one of them.
        elif len(self._rows) % max(1, len(self._rows) // ROWS_PER_LOOK):
            return

        for sign in signs(self._rows, self._config, self._heldout):
            if sign.kind not in self._said:
                logger.warning("step %d: %s", step, sign.sentence)
                self._said.add(sign.kind)
