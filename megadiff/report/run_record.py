"""Read a run's folder as its pages need it."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megadiff.observe.evaluation import Comparison, Evaluation
from megadiff.observe.events import Event, read_events
from megadiff.observe.heldout import compare, read_evaluations
from megadiff.observe.metrics import (
    LOSS,
    Rows,
    Verdict,
    config_number,
    read_rows,
    reward_weights,
    step_of,
    verdict,
)
from megadiff.observe.samples import SavedSample, read_samples
from megadiff.observe.trackers import METRICS_NAME
from megadiff.report.evaluation_page import Evaluations

logger = logging.getLogger(__name__)

CONFIG_NAME = "config.yaml"
PROGRESS_NAME = "progress.json"  # in a checkpoint; the module that writes it imports torch
MAX_NAMED = 5  # runs, in an error


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Contents of a run's folder.

    rows: by step. evaluations: the first and the last one; heldout: the last against the first.
    events: by time.
    config_text: config.yaml as it is, "" without one; settings: its values, {} when unreadable.
    """

    folder: Path
    rows: Rows
    samples: Sequence[SavedSample]
    evaluations: Evaluations
    heldout: Comparison | None
    events: Sequence[Event]
    config_text: str
    settings: Mapping[str, Any]

    @property
    def config(self) -> dict[str, dict[str, Any]]:
        """Return the config's sections; what somebody edited may be none, and is left out."""
        return {key: value for key, value in self.settings.items() if isinstance(value, dict)}

    @property
    def last_step(self) -> int:
        """Return how many steps are finished; 0 is an evaluation before the first one."""
        return step_of(self.rows[-1]) if self.rows else 0

    @property
    def num_steps(self) -> int:
        """Return how many steps were asked for, 0 where the config does not say."""
        number = config_number(self.config, "train", "num_steps") or 0
        return int(number) if math.isfinite(number) else 0

    @property
    def weights(self) -> dict[str, float]:
        return reward_weights(self.config)

    @property
    def untrained(self) -> set[str]:
        """Return the rewards of weight 0, which are logged and evaluated only."""
        return {name for name, weight in self.weights.items() if not weight}

    @property
    def is_finished(self) -> bool:
        return 0 < self.num_steps <= self.last_step

    @property
    def ends(self) -> Verdict | None:
        """Return the reward's course, of a supervised run the loss's, which has no reward."""
        return verdict(self.rows) or verdict(self.rows, key=LOSS)

    @property
    def evaluation(self) -> Evaluation | None:
        """Return the last evaluation, None without any."""
        return self.evaluations[-1][1] if self.evaluations else None


def read_run(folder: Path) -> RunRecord:
    """Read a run. Raises ValueError when the folder holds neither metrics nor a config."""
    check_run(folder)
    config_text, settings = read_config(folder)
    evaluations = read_evaluations(folder)
    return RunRecord(
        # The page shows the folder's name, which '.' has not.
        folder=folder.resolve(),
        rows=read_rows(folder / METRICS_NAME),
        samples=read_samples(folder),
        evaluations=evaluations,
        heldout=compare(evaluations),
        events=read_events(folder),
        config_text=config_text,
        settings=settings,
    )


def read_config(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return config.yaml as it is, "" without one, and its values, {} where it is no yaml."""
    path = folder / CONFIG_NAME
    try:
        # Damaged characters are shown as such: a report of a torn run is worth more than none.
        text = path.read_text("utf-8", errors="replace")
    except FileNotFoundError:
        return "", {}
    except OSError as error:  # a file server that is slow, or a file that only its owner may read
        logger.warning("%s cannot be read: %s", CONFIG_NAME, error.strerror)
        return "", {}

    try:
        settings = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # the latter for a date that is none
        logger.warning("%s cannot be read: %s", CONFIG_NAME, error)
        return text, {}
    return text, settings if isinstance(settings, dict) else {}


def check_run(folder: Path) -> None:
    """Raise ValueError, with what to give instead, for a folder that is no run."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; give a run's folder, e.g. runs/<name>")
    if _is_run(folder):
        return
    if _is_checkpoint(folder):
        run = folder.resolve().parent.parent
        raise ValueError(f"{folder} is a checkpoint; give its run's folder, {run}")

    runs = sorted(path.name for path in folder.iterdir() if _is_run(path))
    hint = "give runs/<name>"
    if runs:
        more = " …" if len(runs) > MAX_NAMED else ""
        hint = f"it holds runs, give one of them: {', '.join(runs[:MAX_NAMED])}{more}"

    raise ValueError(f"{folder} is no run: it has neither {CONFIG_NAME} nor {METRICS_NAME}; {hint}")


def _is_run(folder: Path) -> bool:
    has_record = (folder / CONFIG_NAME).is_file() or (folder / METRICS_NAME).is_file()
    return has_record and not _is_checkpoint(folder)


def _is_checkpoint(folder: Path) -> bool:
    return (folder / PROGRESS_NAME).is_file()
