"""Hold an evaluation: its samples with their rewards, their statistics, and its record on disk.

`<folder>/evaluation.json` has every sample's identity and rewards, and the figures made of them;
`<folder>/images/` has a few samples to look at. A run's folder is `evaluations/step_000040/`.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev

from torch import Tensor

from megadiff.observe.samples import IMAGE_SUFFIX, write_picture
from megadiff.observe.step_folders import step_folder, step_folders
from megadiff.observe.text_files import write_whole
from megadiff.observe.video import FRAMES_PER_S
from megadiff.types import Sampling

EVALUATIONS = "evaluations"  # under a run's folder
RECORD_NAME = "evaluation.json"
IMAGES = "images"
# Half the width, in standard deviations, of the middle 95 % of a normal distribution.
Z_95 = 1.959964
# The same of Student's t with 1, 2, 3 and 4 degrees of freedom (Abramowitz & Stegun, table 26.10).
T_95 = (12.706, 4.303, 3.182, 2.776)
# Five that change alike are 1 of 16 by chance; six are 1 of 32, below 5 % (sign test, two-sided).
MIN_CHANGED = 6
Identity = tuple[str, int]  # prompt id, sample index


@dataclass(frozen=True, kw_only=True)
class MeanEstimate:
    """A mean over n samples and its 95 % interval; low and high are None for too few samples.

    mean is NaN where no sample has the reward.
    """

    mean: float
    low: float | None
    high: float | None
    n: int


@dataclass(frozen=True, kw_only=True)
class EvaluatedSample:
    """A scored sample.

    task: the prompt's, "" without one.
    rewards: name → value, None where it does not apply to the prompt, or failed.
    total: their weighted sum, as training takes it; None where one with a weight failed.
    file: its image relative to the record, or None.
    """

    prompt_id: str
    sample_index: int
    caption: str
    task: str
    rewards: Mapping[str, float | None]
    total: float | None = None
    file: str | None = None

    @property
    def identity(self) -> Identity:
        return self.prompt_id, self.sample_index


# Evaluations that differ in one of these drew other samples and are not compared.
SETTINGS = (
    "seed",
    "num_inference_steps",
    "true_cfg_scale",
    "guidance_scale",
    "guidance_scale_2",
    "height",
    "width",
    "num_frames",
)
RECORDED = ("model", "step", *SETTINGS, "diversity")  # of an evaluation, beside its samples


@dataclass(frozen=True, kw_only=True)
class Evaluation(Sampling):
    """Samples of one model with their rewards, and how these ODE samples were drawn.

    model: the pipeline folder or run. step: of the run's weights, 0 for a model.
    samples: in the order of the plan, every one with the same rewards.
    diversity: figure → mean over the prompts that have one, None where none has.
    """

    model: str
    step: int
    seed: int
    samples: Sequence[EvaluatedSample]
    diversity: Mapping[str, float | None]

    @property
    def reward_names(self) -> list[str]:
        return list(self.samples[0].rewards)

    @property
    def tasks(self) -> list[str]:
        """Return the tasks in the order of the samples; [] when prompts have none."""
        return list(dict.fromkeys(sample.task for sample in self.samples if sample.task))

    @property
    def by_identity(self) -> dict[Identity, EvaluatedSample]:
        return {sample.identity: sample for sample in self.samples}

    @property
    def num_prompts(self) -> int:
        return len({sample.prompt_id for sample in self.samples})

    def is_share(self, reward: str) -> bool:
        """Return True when there are values, each 0 or 1, so that the mean is a share."""
        values = {sample.rewards[reward] for sample in self.samples} - {None}
        return bool(values) and values <= {0, 1}

    def estimate(self, reward: str, task: str | None = None) -> MeanEstimate:
        """Return the mean over all samples that have the reward, or over those of one task."""
        values = [sample.rewards[reward] for sample in self.samples_of(task)]
        return estimate([value for value in values if value is not None])

    def samples_of(self, task: str | None) -> list[EvaluatedSample]:
        """Return the samples of one task, None of all."""
        return [sample for sample in self.samples if task in (None, sample.task)]


def estimate(values: Sequence[float]) -> MeanEstimate:
    """Return mean and 95 % interval, samples taken as independent.

    The interval is Wilson's for values that are all 0 or 1 (E. B. Wilson, JASA 22, 1927: right
    also near 0 and 1), else Student's of the mean, which needs two values.
    """
    if not values or not all(value in (0, 1) for value in values):
        return _mean_estimate(values)
    n = len(values)
    mean = fmean(values)
    scale = 1 + Z_95**2 / n
    centre = (mean + Z_95**2 / (2 * n)) / scale
    half = Z_95 / scale * math.sqrt(mean * (1 - mean) / n + Z_95**2 / (4 * n**2))
    # Rounding may put an end a little outside of 0 … 1.
    return MeanEstimate(mean=mean, low=max(0.0, centre - half), high=min(1.0, centre + half), n=n)


def t_95(num_degrees: int) -> float:
    """Return half the width of the middle 95 % of Student's t, at most 0.0003 off.

    Beyond the table by the expansion of Abramowitz & Stegun, 26.7.5.
    """
    if num_degrees <= len(T_95):
        return T_95[num_degrees - 1]
    z = Z_95
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / num_degrees**power for power, term in enumerate(terms, start=1))


def _mean_estimate(values: Sequence[float]) -> MeanEstimate:
    n = len(values)
    if not n:
        return MeanEstimate(mean=math.nan, low=None, high=None, n=0)
    mean = fmean(values)
    if n < 2:
        return MeanEstimate(mean=mean, low=None, high=None, n=n)
    # Not Z_95: the spread is estimated from the same few values.
    half = t_95(n - 1) * stdev(values) / math.sqrt(n)
    return MeanEstimate(mean=mean, low=mean - half, high=mean + half, n=n)


@dataclass(frozen=True, kw_only=True)
class Difference(MeanEstimate):
    """A reward's mean change on the same noise. won, lost, tied: shares of the n pairs."""

    won: float
    lost: float
    tied: float

    @property
    def num_changed(self) -> int:
        """Return how many pairs differ."""
        return round((self.won + self.lost) * self.n)

    @property
    def excludes_zero(self) -> bool:
        """Return True where the interval leaves out 0."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high

    @property
    def is_clear(self) -> bool:
        """Return True where the interval leaves out 0, and at least MIN_CHANGED pairs differ."""
        return self.excludes_zero and self.num_changed >= MIN_CHANGED


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """An evaluation and a baseline that drew the same samples."""

    evaluation: Evaluation
    baseline: Evaluation

    def __post_init__(self) -> None:
        """Raise ValueError when the two are not about the same noise."""
        # Settings first: with other ones, the samples' names say nothing.
        for key in SETTINGS:
            ours = getattr(self.evaluation, key)
            theirs = getattr(self.baseline, key)
            if ours != theirs:
                raise ValueError(
                    f"{key}={ours}, but {theirs} in the baseline: compare on the same noise and "
                    "settings"
                )

        missing = self.evaluation.by_identity.keys() ^ self.baseline.by_identity.keys()
        if missing:
            raise ValueError(
                f"{len(missing)} samples are only in one of evaluation "
                f"({len(self.evaluation.samples)} samples) and baseline "
                f"({len(self.baseline.samples)}); evaluate both with the same prompts and "
                "num_samples"
            )

    @property
    def reward_names(self) -> list[str]:
        """Return the rewards of both, in the evaluation's order."""
        return [name for name in self.evaluation.reward_names if name in self.baseline.reward_names]

    def is_share(self, reward: str) -> bool:
        """Return True when both have values of the reward that are all 0 or 1."""
        return self.evaluation.is_share(reward) and self.baseline.is_share(reward)

    def difference(self, reward: str, task: str | None = None) -> Difference:
        """Return the mean of paired differences, of all pairs or those of one task."""
        before = self.baseline.by_identity

        # Pairs by identity: the two may hold their samples in another order.
        gains = []
        for sample in self.evaluation.samples_of(task):
            ours = sample.rewards[reward]
            theirs = before[sample.identity].rewards[reward]
            if ours is not None and theirs is not None:
                gains.append(ours - theirs)

        interval = _mean_estimate(gains)
        is_share = self.is_share(reward)
        if is_share and interval.low is not None and interval.high is not None:
            # No share changes by more than 1; the interval of few pairs would.
            interval = replace(interval, low=max(-1.0, interval.low), high=min(1.0, interval.high))

        num_pairs = max(len(gains), 1)
        return Difference(
            **vars(interval),
            won=sum(gain > 0 for gain in gains) / num_pairs,
            lost=sum(gain < 0 for gain in gains) / num_pairs,
            tied=sum(gain == 0 for gain in gains) / num_pairs,
        )


def image_name(prompt_id: str, sample_index: int, *, suffix: str = IMAGE_SUFFIX) -> str:
    """Return the path of a sample's image or video, relative to the record's folder."""
    return f"{IMAGES}/{prompt_id}_{sample_index}{suffix}"


def to_json(evaluation: Evaluation) -> dict[str, object]:
    """Return the record: the evaluation's fields, and every reward's mean in all and by task."""
    record = {name: getattr(evaluation, name) for name in RECORDED}
    record["num_samples"] = len(evaluation.samples)
    record["num_prompts"] = evaluation.num_prompts
    record["rewards"] = _by_task(evaluation.estimate, evaluation.reward_names, evaluation.tasks)
    record["samples"] = [asdict(sample) for sample in evaluation.samples]
    return record


def _by_task(
    estimate_of: Callable[..., MeanEstimate], rewards: Sequence[str], tasks: Sequence[str]
) -> dict[str, object]:
    """Return reward → its estimate over all samples, and by task."""
    records: dict[str, object] = {}
    for reward in rewards:
        by_task = {task: _record(estimate_of(reward, task)) for task in tasks}
        records[reward] = _record(estimate_of(reward)) | {"by_task": by_task}
    return records


def _record(estimate: MeanEstimate) -> dict[str, object]:
    # JSON has no NaN
    return asdict(estimate) | ({} if estimate.n else {"mean": None})


def comparison_to_json(comparison: Comparison) -> dict[str, object]:
    """Return every reward's paired difference over all samples and by task."""
    evaluation = comparison.evaluation
    baseline = comparison.baseline
    return {
        "model": evaluation.model,
        "step": evaluation.step,
        "baseline": baseline.model,
        "baseline_step": baseline.step,
        "rewards": _by_task(comparison.difference, comparison.reward_names, evaluation.tasks),
    }


def write_evaluation(
    folder: Path,
    evaluation: Evaluation,
    images: Mapping[str, Tensor],
    *,
    frames_per_s: int = FRAMES_PER_S,
) -> Path:
    """Write images, then the record, and return the record's path.

    All is written aside and renamed, so a folder with a record is whole. An older evaluation in
    the folder is replaced.
    images: `file` of a sample → its pixels, uint8 [F, H, W, 3]; videos become MP4 files.
    """
    aside = folder / f".{IMAGES}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    for name, pixels in images.items():
        write_picture(aside / Path(name).name, pixels, frames_per_s=frames_per_s)

    record = folder / RECORD_NAME
    # The record goes first and comes last: with it, the images beside it are its own.
    record.unlink(missing_ok=True)
    shutil.rmtree(folder / IMAGES, ignore_errors=True)
    aside.rename(folder / IMAGES)
    write_json(record, to_json(evaluation))
    return record


def write_json(path: Path, value: object) -> None:
    """Write JSON aside and rename it. Raises ValueError for NaN and infinity."""
    # Not NaN: JSON has none, so a reader in another language would refuse the whole file.
    write_whole(path, json.dumps(value, ensure_ascii=False, allow_nan=False, indent=1) + "\n")


def read_evaluation(folder: Path) -> Evaluation:
    """Read a folder's evaluation. Raises ValueError when it holds none."""
    path = folder / RECORD_NAME
    try:
        record = json.loads(path.read_text("utf-8"))
        samples = [EvaluatedSample(**sample) for sample in record["samples"]]
        # The record's estimates are left out: they are made anew from the samples.
        settings = {name: record[name] for name in RECORDED}
        names = {tuple(sorted(sample.rewards)) for sample in samples}
        if len(names) != 1:
            raise ValueError(f"{len(samples)} samples with {len(names)} sets of rewards")
        return Evaluation(**settings, samples=samples)
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is no evaluation ({error!r}); write one with: megadiff evaluate MODEL_OR_RUN"
        ) from error


def evaluation_folder(run_folder: Path, step: int) -> Path:
    return step_folder(run_folder / EVALUATIONS, step)


def evaluation_folders(run_folder: Path) -> list[tuple[int, Path]]:
    """Return (step, folder) of every whole evaluation of a run, by rising step."""
    folders = step_folders(run_folder / EVALUATIONS)
    return [(step, folder) for step, folder in folders if (folder / RECORD_NAME).is_file()]
