"""An evaluation: which samples got which rewards, what follows from them, and its record on disk.

`<folder>/evaluation.json` holds every sample's identity and rewards with the figures made of them; `<folder>/images/` a few
of the samples to look at. In a run the folder is `evaluations/step_000040/`.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean, stdev

from torch import Tensor

from megadiff.observe.samples import IMAGE_SUFFIX, write_picture
from megadiff.observe.video import FRAMES_PER_S

RECORD_NAME = "evaluation.json"
IMAGES = "images"
Z_95 = (
    1.959964  # half the width, in standard deviations, of the middle 95 % of a normal distribution
)
_STEP_FOLDER = re.compile(r"step_(\d+)")
Identity = tuple[str, int]  # prompt id, sample index


@dataclass(frozen=True, kw_only=True)
class MeanEstimate:
    """A mean over n samples and its 95 % interval; low and high are None where n is too small for one."""

    mean: float
    low: float | None
    high: float | None
    n: int


@dataclass(frozen=True, kw_only=True)
class EvaluatedSample:
    """task: the prompt's, "" without one. rewards: name → value. file: its image relative to the record, or None."""

    prompt_id: str
    sample_index: int
    caption: str
    task: str
    rewards: Mapping[str, float]
    file: str | None = None

    @property
    def identity(self) -> Identity:
        return self.prompt_id, self.sample_index


SETTINGS = (
    *("seed", "num_inference_steps", "true_cfg_scale", "guidance_scale", "guidance_scale_2"),
    *("height", "width", "num_frames"),
)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """model: the pipeline folder or run; step: of the run's weights, 0 for a model. SETTINGS: how the ODE samples were
    drawn, as in types.Sampling. samples: in the order of the plan, every one with the
    same rewards. diversity: figure → mean over the prompts that have one, None where none has."""

    model: str
    step: int
    seed: int
    num_inference_steps: int
    true_cfg_scale: float
    height: int
    width: int
    samples: Sequence[EvaluatedSample]
    diversity: Mapping[str, float | None]
    num_frames: int = 1
    guidance_scale: float = 1.0
    guidance_scale_2: float = 0.0

    @property
    def reward_names(self) -> list[str]:
        return list(self.samples[0].rewards)

    @property
    def tasks(self) -> list[str]:
        """In the order of the samples; [] when prompts have none."""
        return [task for task in dict.fromkeys(sample.task for sample in self.samples) if task]

    @property
    def num_prompts(self) -> int:
        return len({sample.prompt_id for sample in self.samples})

    def is_share(self, reward: str) -> bool:
        """Whether every value is 0 or 1, so that the mean is a share."""
        return all(sample.rewards[reward] in (0, 1) for sample in self.samples)

    def estimate(self, reward: str, task: str | None = None) -> MeanEstimate:
        """Mean of a reward over all samples, or over those of one task."""
        return estimate([s.rewards[reward] for s in self.samples if task is None or s.task == task])


def estimate(values: Sequence[float]) -> MeanEstimate:
    """Mean and 95 % interval, samples taken as independent: Wilson's for values that are all 0 or 1 (E. B. Wilson,
    JASA 22, 1927: right also near 0 and 1), else the normal one of the mean, which needs two values."""
    n, mean = len(values), fmean(values)
    if all(value in (0, 1) for value in values):
        centre = (mean + Z_95**2 / (2 * n)) / (1 + Z_95**2 / n)
        half = Z_95 / (1 + Z_95**2 / n) * math.sqrt(mean * (1 - mean) / n + Z_95**2 / (4 * n**2))
        return MeanEstimate(mean=mean, low=max(0.0, centre - half), high=min(1.0, centre + half), n=n)
    return _normal_estimate(values)


def _normal_estimate(values: Sequence[float]) -> MeanEstimate:
    n, mean = len(values), fmean(values)
    if n < 2:
        return MeanEstimate(mean=mean, low=None, high=None, n=n)
    half = Z_95 * stdev(values) / math.sqrt(n)
    return MeanEstimate(mean=mean, low=mean - half, high=mean + half, n=n)


@dataclass(frozen=True, kw_only=True)
class Difference(MeanEstimate):
    """Of a reward on the same noise, evaluation less baseline. won, lost, tied: shares of the n pairs."""

    won: float
    lost: float
    tied: float

    @property
    def is_clear(self) -> bool:
        """Return True where the interval leaves out 0."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """An evaluation and a baseline that drew the same samples. differences: reward → over all pairs."""

    evaluation: Evaluation
    baseline: Evaluation

    def __post_init__(self) -> None:
        """ValueError when the two are not about the same noise."""
        for key in SETTINGS:
            ours, theirs = getattr(self.evaluation, key), getattr(self.baseline, key)
            if ours != theirs:
                raise ValueError(
                    f"{key}={ours}, but {theirs} in the baseline: compare on the same noise and settings"
                )
        missing = _identities(self.evaluation) ^ _identities(self.baseline)
        if missing:
            raise ValueError(
                f"{len(missing)} samples are only in one of evaluation ({len(self.evaluation.samples)} samples) and "
                f"baseline ({len(self.baseline.samples)}); evaluate both with the same prompts and num_samples"
            )

    @property
    def reward_names(self) -> list[str]:
        """Of both."""
        return [name for name in self.evaluation.reward_names if name in self.baseline.reward_names]

    def difference(self, reward: str, task: str | None = None) -> Difference:
        """Mean over the pairs, all or those of one task, with the 95 % interval of paired differences."""
        before = {sample.identity: sample.rewards[reward] for sample in self.baseline.samples}
        chosen = [
            sample for sample in self.evaluation.samples if task is None or sample.task == task
        ]
        gains = [sample.rewards[reward] - before[sample.identity] for sample in chosen]
        won, lost = (fmean(gain > 0 for gain in gains), fmean(gain < 0 for gain in gains))
        return Difference(
            **vars(_normal_estimate(gains)),
            won=won,
            lost=lost,
            tied=fmean(gain == 0 for gain in gains),
        )


def _identities(evaluation: Evaluation) -> set[Identity]:
    return {sample.identity for sample in evaluation.samples}


def image_name(prompt_id: str, sample_index: int, *, suffix: str = IMAGE_SUFFIX) -> str:
    """Path of a sample's image or video, relative to the record's folder. suffix: see samples.picture_suffix."""
    return f"{IMAGES}/{prompt_id}_{sample_index}{suffix}"


def to_json(evaluation: Evaluation) -> dict[str, object]:
    """The record: the evaluation's fields, and per reward its estimate over all samples and by task."""
    rewards = {
        name: asdict(evaluation.estimate(name))
        | {"by_task": {task: asdict(evaluation.estimate(name, task)) for task in evaluation.tasks}}
        for name in evaluation.reward_names
    }
    head = {field.name: getattr(evaluation, field.name) for field in fields(evaluation)}
    counts = {
        "num_samples": len(evaluation.samples),
        "num_prompts": evaluation.num_prompts,
        "rewards": rewards,
    }
    return head | counts | {"samples": [asdict(sample) for sample in evaluation.samples]}


def from_json(record: Mapping[str, object]) -> Evaluation:
    """The evaluation of a record; its estimates are made anew from the samples."""
    known = {field.name for field in fields(Evaluation)} - {"samples"}
    samples = [EvaluatedSample(**sample) for sample in record["samples"]]  # type: ignore[attr-defined]
    return Evaluation(**{name: record[name] for name in known}, samples=samples)  # type: ignore[arg-type]


def comparison_to_json(comparison: Comparison) -> dict[str, object]:
    """Per reward the paired difference over all samples and by task."""
    tasks = comparison.evaluation.tasks
    rewards = {
        name: asdict(comparison.difference(name))
        | {"by_task": {task: asdict(comparison.difference(name, task)) for task in tasks}}
        for name in comparison.reward_names
    }
    ours, theirs = comparison.evaluation, comparison.baseline
    return {
        "model": ours.model,
        "step": ours.step,
        "baseline": theirs.model,
        "baseline_step": theirs.step,
        "rewards": rewards,
    }


def write_evaluation(
    folder: Path,
    evaluation: Evaluation,
    images: Mapping[str, Tensor],
    *,
    frames_per_s: int = FRAMES_PER_S,
) -> Path:
    """Writes images, then the record, each aside and renamed, and returns the record's path: a folder with a record is whole.

    images: `file` of a sample → its pixels, uint8 [F, H, W, 3]; of videos, MP4 files are written. An older evaluation in
    the folder is replaced.
    """
    aside = folder / f".{IMAGES}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    for name, pixels in images.items():
        write_picture(aside / Path(name).name, pixels, frames_per_s=frames_per_s)
    record = folder / RECORD_NAME
    record.unlink(missing_ok=True)
    shutil.rmtree(folder / IMAGES, ignore_errors=True)
    aside.rename(folder / IMAGES)
    write_json(record, to_json(evaluation))
    return record


def write_json(path: Path, value: object) -> None:
    """Aside and renamed; NaN and infinity are refused."""
    aside = path.with_name(f".{path.name}")
    aside.write_text(
        json.dumps(value, ensure_ascii=False, allow_nan=False, indent=1) + "\n", "utf-8"
    )
    os.replace(aside, path)


def read_evaluation(folder: Path) -> Evaluation:
    """ValueError when the folder holds no evaluation."""
    path = folder / RECORD_NAME
    try:
        return from_json(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is no evaluation ({error!r}); write one with: megadiff evaluate MODEL_OR_RUN"
        ) from error


def evaluation_folder(run_folder: Path, step: int) -> Path:
    return run_folder / "evaluations" / f"step_{step:06d}"


def evaluation_folders(run_folder: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every whole evaluation of a run, by rising step; read_evaluation reads one."""
    found = (
        (_STEP_FOLDER.fullmatch(path.name), path)
        for path in (run_folder / "evaluations").glob("step_*")
    )
    return sorted(
        (int(match[1]), path) for match, path in found if match and (path / RECORD_NAME).is_file()
    )


def drop_evaluations_after(run_folder: Path, *, step: int) -> None:
    """Removes the evaluations of later steps: a run resumed at `step` makes them again."""
    for later, folder in evaluation_folders(run_folder):
        if later > step:
            shutil.rmtree(folder)
