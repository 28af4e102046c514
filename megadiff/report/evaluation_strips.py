"""Show held-out samples over a whole run: the same prompt and noise at every evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megadiff.observe.evaluation import (
    SETTINGS,
    EvaluatedSample,
    Evaluation,
    evaluation_folders,
    read_evaluation,
)
from megadiff.report.charts import Drawing
from megadiff.report.evaluation_page import ALL_ALIKE, Weights, leading_reward
from megadiff.report.pictures import (
    MAX_COLUMNS,
    MAX_PROMPTS,
    evenly_spaced,
    load_pictures,
    rewards_text,
)

MIN_COLUMNS = 3  # two evaluations are what the wall shows


def evaluation_strips(run_folder: Path, weights: Weights = ALL_ALIKE) -> list[Drawing]:
    """Return a strip per prompt, as pictures.strips does: a look or None per evaluation.

    Tasks take turns. weights: of rewards; the leading one is shown.
    [] for fewer than three evaluations, or without pictures of their samples.
    """
    columns = _columns(run_folder)
    if len(columns) < MIN_COLUMNS:
        return []
    _, last = columns[-1]
    # One for all looks: a reward that is 0 or 1 at first may be a share of the first alone.
    reward = leading_reward(last, weights)
    strips: list[Drawing] = []
    for sample in _by_turns(last):
        strips.append({"caption": sample.caption, "looks": _looks(sample, columns, reward)})

    looks = [look for strip in strips for look in strip["looks"] if look]
    # All at once: together they have to be small enough for one page.
    pictures = load_pictures([look["path"] for look in looks])
    for look in looks:
        look["picture"] = pictures.get(look["path"])

    return strips if pictures else []


def _columns(run_folder: Path) -> list[tuple[Path, Evaluation]]:
    """Return (folder, evaluation) of evenly spaced evaluations, without those that are torn."""
    folders = dict(evaluation_folders(run_folder))
    columns = []
    for step in evenly_spaced(sorted(folders), MAX_COLUMNS):
        try:
            columns.append((folders[step], read_evaluation(folders[step])))
        except ValueError:
            continue  # read_evaluations() warned of the first and the last
    # Other settings draw other pictures from the same noise.
    return [column for column in columns if _settings(column[1]) == _settings(columns[-1][1])]


def _settings(evaluation: Evaluation) -> list[object]:
    return [getattr(evaluation, name) for name in SETTINGS]


def _by_turns(evaluation: Evaluation) -> Sequence[EvaluatedSample]:
    """Return pictured samples: the first of each task, then the second of each, and so on."""
    by_task: dict[str, list[EvaluatedSample]] = {}
    for sample in evaluation.samples:
        if sample.file:
            by_task.setdefault(sample.task, []).append(sample)
    order = []
    for samples in by_task.values():
        order += list(enumerate(samples))
    order.sort(key=lambda numbered: numbered[0])  # stable: tasks keep their order
    return [sample for _, sample in order[:MAX_PROMPTS]]


def _looks(
    sample: EvaluatedSample, columns: Sequence[tuple[Path, Evaluation]], reward: str
) -> list[Drawing | None]:
    """Return how each evaluation drew a sample, None where it has no picture of it."""
    looks: list[Drawing | None] = []

    for folder, evaluation in columns:
        drawn = evaluation.by_identity.get(sample.identity)
        if drawn is None or not drawn.file:
            looks.append(None)
            continue
        step = f"step {evaluation.step}"
        look = {
            "path": folder / drawn.file,
            "alt": f"{drawn.caption}, {step}",
            "title": f"{step}: {rewards_text(drawn.rewards) or 'no rewards'}",
            "label": evaluation.step,
            "reward": drawn.rewards.get(reward),
        }
        looks.append(look)

    return looks
