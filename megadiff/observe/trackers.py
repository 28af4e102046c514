"""Send metrics and samples to the run's folder, and when asked to TensorBoard and W&B."""

from __future__ import annotations

import importlib
import json
import logging
import math
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from megadiff.observe.alarm import Alarm
from megadiff.observe.evaluation import EVALUATIONS
from megadiff.observe.metrics import check_keys, parse_row, read_rows, step_of
from megadiff.observe.prometheus import PromTracker
from megadiff.observe.samples import SAMPLES, SampleRecord, frame_strip, sample_grid, save_samples
from megadiff.observe.step_folders import drop_steps_after
from megadiff.observe.text_files import read_lines, write_whole

logger = logging.getLogger(__name__)

METRICS_NAME = "metrics.jsonl"
BEFORE_ALL = -1  # below step 0, whose line holds the evaluation before the first step


class Tracker(Protocol):
    """A receiver of metrics and samples. Metrics may hold NaN and infinity."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def images(self, step: int, samples: Sequence[SampleRecord]) -> None: ...

    def close(self) -> None: ...


class FolderTracker:
    """Write `metrics.jsonl` and `samples/` of the run's folder.

    Each line is flushed: a killed run loses at most its last.
    """

    def __init__(self, run_folder: Path, *, config: Mapping[str, Any], resume_step: int) -> None:
        self._run_folder = run_folder
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

    def images(self, step: int, samples: Sequence[SampleRecord]) -> None:
        save_samples(self._run_folder, step=step, samples=samples)

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


class TensorBoardTracker:
    """Write scalars, and per step one grid of samples with its captions, under `tensorboard/`."""

    def __init__(self, run_folder: Path, *, config: Mapping[str, Any], resume_step: int) -> None:
        module = _module_of("tensorboard", "torch.utils.tensorboard")
        # TensorBoard hides what an earlier attempt wrote from this step on.
        purge_step = resume_step + 1 if resume_step else None
        self._writer = module.SummaryWriter(
            log_dir=str(run_folder / "tensorboard"), purge_step=purge_step
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def images(self, step: int, samples: Sequence[SampleRecord]) -> None:
        lines = [f"{n}. {s.caption} · **{s.reward:.3f}**" for n, s in enumerate(samples, 1)]
        self._writer.add_image("samples", sample_grid(samples), step)
        self._writer.add_text("samples/captions", "\n".join(lines), step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """Log to a Weights & Biases run, which a resumed run continues by the id in its folder."""

    def __init__(self, run_folder: Path, *, config: Mapping[str, Any], resume_step: int) -> None:
        self._wandb = _module_of("wandb", "wandb")
        id_path = run_folder / "wandb_id"

        # A run that starts over in the same folder is another one to W&B.
        if not (resume_step and id_path.exists()):
            id_path.write_text(uuid.uuid4().hex[:8], "utf-8")

        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", "megadiff"),
            name=run_folder.name,
            id=id_path.read_text("utf-8").strip(),
            dir=str(run_folder),
            config=dict(config),
            resume="allow",
        )

        # A resumed run repeats steps, which wandb's own counter refuses: plot over ours.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def images(self, step: int, samples: Sequence[SampleRecord]) -> None:
        images = []
        for sample in samples:
            caption = f"{sample.caption} · {sample.reward:.3f}"
            images.append(self._wandb.Image(frame_strip(sample.pixels).numpy(), caption=caption))
        self._run.log({"step": step, "samples": images})

    def close(self) -> None:
        self._run.finish()


def _module_of(tracker: str, module: str) -> ModuleType:
    """Import what a tracker needs. Raises ValueError, with the extra to install, without it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"track has {tracker}, which is not installed; pip install 'megadiff[{tracker}]' or "
            f"take {tracker} out of track"
        ) from error


TRACKERS: dict[str, Callable[..., Tracker]] = {
    "jsonl": FolderTracker,
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
}


class Trackers:
    """Pass metrics and samples to all trackers; `Trackers(())` is for the ranks that do not log."""

    def __init__(self, trackers: Sequence[Tracker], *, last_step: int = BEFORE_ALL) -> None:
        self._trackers = tuple(trackers)
        self._last_step = last_step

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log a step's metrics. Raises ValueError for a bad key, or a step that does not rise."""
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

    def images(self, step: int, samples: Sequence[SampleRecord]) -> None:
        """Pass on the samples of one step; nothing happens without samples."""
        for tracker in self._trackers if samples else ():
            tracker.images(step, samples)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


def check_trackers(names: Sequence[str]) -> None:
    """Raise ValueError for the name of no tracker."""
    unknown = sorted(set(names) - TRACKERS.keys())
    if unknown:
        raise ValueError(
            f"track has unknown {', '.join(unknown)}; the trackers are {', '.join(TRACKERS)}"
        )


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
    return Trackers(built, last_step=resume_step or BEFORE_ALL)
