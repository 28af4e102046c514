"""Send metrics and samples to the run's folder, and when asked to TensorBoard and W&B."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megadiff.observe.alarm import Alarm
from megadiff.observe.evaluation import (
    EVALUATIONS,
    RECORD_NAME,
    evaluation_folder,
    evaluation_folders,
    read_evaluation,
)
from megadiff.observe.metrics import check_keys, parse_row, read_rows, step_of
from megadiff.observe.prometheus import PromTracker
from megadiff.observe.samples import (
    SAMPLES,
    SampleRecord,
    SavedSample,
    read_step_samples,
    save_samples,
)
from megadiff.observe.step_folders import drop_steps_after
from megadiff.observe.tensorboard_tracker import TensorBoardTracker
from megadiff.observe.text_files import read_lines, write_whole
from megadiff.observe.tracker import Tracker, not_installed
from megadiff.observe.wandb_tracker import WandbTracker

logger = logging.getLogger(__name__)

METRICS_NAME = "metrics.jsonl"
BEFORE_ALL = -1  # below step 0, whose line holds the evaluation before the first step


def has_figures(run_folder: Path) -> bool:
    """Return whether a run's folder has metrics or evaluations, of this start or an earlier one."""
    return bool(read_rows(run_folder / METRICS_NAME) or evaluation_folders(run_folder))


class FolderTracker(Tracker):
    """Write `metrics.jsonl` of the run's folder.

    Each line is flushed: a killed run loses at most its last.
    """

    def __init__(self, run_folder: Path, *, config: Mapping[str, Any], resume_step: int) -> None:
        # A run that starts over makes the evaluation before its first step again.
        last_step = resume_step or BEFORE_ALL
        path = run_folder / METRICS_NAME
        _drop_rows_after(path, last_step)
        drop_steps_after(run_folder / SAMPLES, resume_step)
        drop_steps_after(run_folder / EVALUATIONS, last_step)
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        bad = [key for key, value in metrics.items() if not math.isfinite(value)]
        if bad:
            logger.warning("step %d: %s not finite, written as null", step, ", ".join(bad))
        row = {"step": step, **metrics, **dict.fromkeys(bad)}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        # A killed process loses what is in its own buffer, not what the kernel has.
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _drop_rows_after(path: Path, step: int) -> None:
    """Drop torn lines and later steps of a metrics.jsonl: a resumed run writes those again.

    What stays is the same byte for byte. It is written aside and renamed.
    """
    if not path.exists():
        return

    lines = read_lines(path)
    earlier = []

    for line in lines:
        row = parse_row(line)
        # A line without its end would run into the next that is written.
        if row is not None and line.endswith("\n") and step_of(row) <= step:
            earlier.append(line)

    num_dropped = len(lines) - len(earlier)
    if not num_dropped:
        return

    logger.info("%s: %d lines after step %d dropped", path, num_dropped, step)
    write_whole(path, "".join(earlier))


TRACKERS: dict[str, Callable[..., Tracker]] = {
    "jsonl": FolderTracker,
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
}


PACKAGES = ("tensorboard", "wandb")  # that a tracker of the same name needs


class Trackers:
    """Pass what a run records to all trackers; `Trackers(())` is for the ranks that do not log.

    run_folder: where samples are saved, and evaluations read; None records no pictures.
    """

    def __init__(
        self,
        trackers: Sequence[Tracker],
        *,
        run_folder: Path | None = None,
        last_step: int = BEFORE_ALL,
    ) -> None:
        self._trackers = tuple(trackers)
        self._run_folder = run_folder
        self._last_step = last_step

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log a step's metrics, with those of an evaluation its pictures too.

        Raises ValueError for a bad key, or a step that does not rise.
        """
        check_keys(metrics)
        if step <= self._last_step:
            raise ValueError(
                f"step={step} <= {self._last_step}, the last one logged; a step is one line, so "
                "merge its metrics first"
            )

        values = {key: float(value) for key, value in metrics.items()}
        for tracker in self._trackers:
            tracker.log(step, values)

        # Only now: a step whose line was not written may be logged again.
        self._last_step = step

        if self._run_folder is not None and any(key.startswith("eval/") for key in metrics):
            self._pass_on("evaluation", step, read_evaluated(self._run_folder, step))

    def images(self, step: int, samples: Sequence[SampleRecord]) -> None:
        """Save the samples of one step and pass them on; nothing happens without samples."""
        if self._run_folder is None or not samples:
            return
        folder = save_samples(self._run_folder, step=step, samples=samples)
        self._pass_on("samples", step, read_step_samples(folder, step))

    def _pass_on(self, name: str, step: int, samples: Sequence[SavedSample]) -> None:
        for tracker in self._trackers if samples else ():
            tracker.pictures(name, step, samples)

    def page(self, path: Path) -> None:
        """Pass on the report page of a run that has ended."""
        for tracker in self._trackers:
            tracker.page(path)

    def close(self) -> None:
        """Close all trackers."""
        for tracker in self._trackers:
            tracker.close()


def read_evaluated(run_folder: Path, step: int) -> list[SavedSample]:
    """Return the pictured samples of the run's evaluation at a step; [] without its record."""
    folder = evaluation_folder(run_folder, step)
    if not (folder / RECORD_NAME).is_file():
        return []
    saved = []

    for sample in read_evaluation(folder).samples:
        if sample.file and (folder / sample.file).is_file():
            saved.append(
                SavedSample(
                    path=folder / sample.file,
                    step=step,
                    caption=sample.caption,
                    rewards=sample.rewards,
                    reward=None,
                    prompt_id=sample.prompt_id,
                    sample_index=sample.sample_index,
                    policy_version=step,
                )
            )

    return saved


def check_trackers(names: Sequence[str]) -> None:
    """Raise ValueError for the name of no tracker, or one whose package is not installed."""
    unknown = sorted(set(names) - TRACKERS.keys())
    if unknown:
        raise ValueError(
            f"track has unknown {', '.join(unknown)}; the trackers are {', '.join(TRACKERS)}"
        )
    for name in names:
        # Now, and not when replicas and engine have started.
        if name in PACKAGES and find_spec(name) is None:
            raise ValueError(not_installed(name))


def build_trackers(
    names: Sequence[str], run_folder: Path, config: Mapping[str, Any], *, resume_step: int = 0
) -> Trackers:
    """Build the trackers of a run that continues after `resume_step` (0: from the start).

    `jsonl` is always among them. What the folder holds of later steps is dropped, so only one
    rank may call it. Raises ValueError for an unknown name or a missing package.
    """
    check_trackers(names)
    run_folder.mkdir(parents=True, exist_ok=True)
    wanted = dict.fromkeys(["jsonl", *names])
    built = [TRACKERS[name](run_folder, config=config, resume_step=resume_step) for name in wanted]
    # After the folder's tracker, which has dropped the rows of later steps.
    built.append(PromTracker(run_folder))
    built.append(Alarm(run_folder, config=config, rows=read_rows(run_folder / METRICS_NAME)))

    return Trackers(built, run_folder=run_folder, last_step=resume_step or BEFORE_ALL)
