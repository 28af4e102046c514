"""Follow a run's folder while the run goes on: each look reads only what is new.

A look never fails on what a live run writes: half a line is read when it is whole, and a resumed
run, which cuts its metrics, is read again from the start.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from megadiff.observe.evaluation import RECORD_NAME, Comparison, evaluation_folders
from megadiff.observe.events import EVENTS, read_events
from megadiff.observe.heldout import compare, read_evaluations
from megadiff.observe.metrics import parse_row, step_of
from megadiff.observe.samples import INDEX_NAME, SAMPLES, read_step_samples
from megadiff.observe.step_folders import step_folders
from megadiff.observe.trackers import METRICS_NAME
from megadiff.report.evaluation_page import Evaluations
from megadiff.report.health import findings
from megadiff.report.run_record import CONFIG_NAME, RunRecord, check_run, read_config


@dataclass(frozen=True, kw_only=True)
class RunView(RunRecord):
    """Hold a run as it is at one look. Its samples are those of the last saved step.

    alarms: sentences, the gravest first.
    logged_at: when metrics were last written, in seconds of time.time(); None before.
    """

    alarms: Sequence[str]
    logged_at: float | None


class MetricsFollower:
    """Read a metrics.jsonl as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begin(file=None)

    def _begin(self, file: int | None) -> None:
        self._file = file  # its inode
        self._offset = 0
        self._rows: dict[int, dict[str, float | None]] = {}

    def read(self) -> list[dict[str, float | None]]:
        """Return all rows by rising step; [] without a file. Torn lines are skipped."""
        try:
            with self._path.open("rb") as file:
                self._read_on(file)
        except FileNotFoundError:
            self._begin(file=None)

        return [self._rows[step] for step in sorted(self._rows)]

    def _read_on(self, file: BinaryIO) -> None:
        status = os.fstat(file.fileno())
        # A resumed run drops later steps: it writes another file and renames it.
        if status.st_ino != self._file or status.st_size < self._offset:
            self._begin(status.st_ino)

        file.seek(self._offset)
        new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)

        for line in whole.decode("utf-8", errors="replace").split("\n"):
            row = parse_row(line)
            if row is not None:
                self._rows.setdefault(step_of(row), {}).update(row)


class RunFollower:
    """Look at a run again and again. Raises ValueError for a folder that is no run."""

    def __init__(self, folder: Path) -> None:
        check_run(folder)
        self._folder = folder
        self._metrics = MetricsFollower(folder / METRICS_NAME)
        self._known: dict[str, tuple[Hashable, Any]] = {}

    def look(self) -> RunView:
        """Return the run as it is now. Raises ValueError when its folder is gone."""
        check_run(self._folder)
        folder = self._folder
        rows = self._metrics.read()
        config_text, settings = self._unless_same(
            "config", _mark(folder / CONFIG_NAME), lambda: read_config(folder)
        )

        evaluated = tuple(_mark(path / RECORD_NAME) for _, path in evaluation_folders(folder))
        evaluations, heldout = self._unless_same(
            "evaluations", evaluated, lambda: _read_evaluations(folder)
        )

        saved = step_folders(folder / SAMPLES)[-1:]
        samples = self._unless_same(
            "samples",
            tuple(_mark(path / INDEX_NAME) for _, path in saved),
            lambda: [sample for step, path in saved for sample in read_step_samples(path, step)],
        )

        happened = tuple(_mark(path) for path in sorted(folder.glob(f"{EVENTS}*.jsonl")))
        events = self._unless_same("events", happened, lambda: read_events(folder))

        metrics = _mark(folder / METRICS_NAME)
        view = RunView(
            # '.' has no name of its own
            folder=folder.resolve(),
            rows=rows,
            samples=samples,
            evaluations=evaluations,
            heldout=heldout,
            events=events,
            config_text=config_text,
            settings=settings,
            alarms=(),
            logged_at=metrics[-1] / 1e9 if metrics else None,
        )
        alarms = self._unless_same(
            "alarms", (metrics, evaluated), lambda: findings(rows, view.config, heldout)
        )
        return replace(view, alarms=alarms)

    def _unless_same(self, name: str, mark: Hashable, read: Callable[[], Any]) -> Any:
        """Return what was read last time where the mark is the same, else read it."""
        if name not in self._known or self._known[name][0] != mark:
            self._known[name] = (mark, read())

        return self._known[name][1]


def _mark(path: Path) -> tuple[int, ...]:
    """Return what changes when a file does, () without a file. The last is its time in ns."""
    try:
        status = path.stat()
    except OSError:
        return ()

    return status.st_ino, status.st_size, status.st_mtime_ns


def _read_evaluations(folder: Path) -> tuple[Evaluations, Comparison | None]:
    evaluations = read_evaluations(folder)
    return evaluations, compare(evaluations)
