"""Compare runs: their configs, curves, held-out scores and seconds, as data for a page and a text.

Evaluations are paired sample by sample, where two runs drew from the same noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megadiff.config.flat import flat_texts
from megadiff.observe.evaluation import Comparison, Evaluation
from megadiff.observe.metrics import (
    STAGES,
    Rows,
    column,
    finite,
    format_seconds,
    median,
    metric_keys,
    pretty_number,
    run_seconds,
    step_of,
    step_seconds,
    verdict,
)
from megadiff.report.charts import Drawing, MetricCurve, mean_or_none, overlay_chart
from megadiff.report.evaluation_page import leading_reward
from megadiff.report.evaluation_table import (
    DIFFERENCE_HEAD,
    RewardFormat,
    difference_cells,
    reward_format,
)
from megadiff.report.events_section import resume_changes
from megadiff.report.report import UNTIMED, chart_words, section_keys, stage_seconds
from megadiff.report.run_record import RunRecord, read_run

MAX_RUNS = 16  # that a reader can tell apart, by eight colours and dashes
MAX_GRID = 200  # points of a curve
OWN_KEYS = {"run.name", "run.dir", "rollout.registry"}  # say where a run is, not what it does
MISSING = "–"
# Sections of the report whose curves are worth laying over each other.
SECTIONS = (
    "Reward",
    "Loss",
    "Held-out evaluation",
    "Diversity",
    "Rewards",
    "Policy health",
    "Speed and memory",
)
SPEED = "perf/samples_per_s"
Runs = Mapping[str, RunRecord]  # by names that tell them apart


def read_runs(folders: Sequence[Path]) -> Runs:
    """Read the runs. Raises ValueError for fewer than two, too many, twice the same, or no run."""
    if not 2 <= len(folders) <= MAX_RUNS:
        raise ValueError(
            f"{len(folders)} runs, a comparison takes 2 to {MAX_RUNS}; give as many folders"
        )

    paths = [folder.resolve() for folder in folders]
    twice = sorted({str(path) for path in paths if paths.count(path) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice)} was given twice; give each run once")

    return dict(zip(distinct_names(paths), map(read_run, folders), strict=True))


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """Return for each path as many of its last parts as tell it from all others."""
    names = []

    for path in paths:
        others = [other for other in paths if other != path]
        length = 1
        while any(other.parts[-length:] == path.parts[-length:] for other in others):
            length += 1

        names.append("/".join(path.parts[-length:]))

    return names


def config_rows(runs: Runs) -> list[list[str]]:
    """Return the head, and a row for each key of the configs in which the runs differ."""
    configs = [dict(flat_texts(run.settings)) for run in runs.values()]
    keys = list(dict.fromkeys(key for config in configs for key in config))
    rows = []
    for key in keys:
        values = [config.get(key, MISSING) for config in configs]
        if len(set(values)) > 1 and key not in OWN_KEYS:
            rows.append([key, *values])

    # config.yaml has a run's last settings: earlier steps may have been trained with others.
    changes = [resume_changes(run.events) or MISSING for run in runs.values()]
    if set(changes) != {MISSING}:
        rows.append(["resumed", *changes])

    return [["key", *runs], *rows]


def overlays(runs: Runs) -> dict[str, list[Drawing]]:
    """Return section → charts of the metrics that any run has, all runs over each other."""
    keys = sorted({key for run in runs.values() for key in metric_keys(run.rows)})
    last_step = max(run.last_step for run in runs.values())
    size = -(-last_step // MAX_GRID) or 1
    sections = section_keys(keys)
    sections["Speed and memory"].append("time/step_s")

    drawings = {}
    for section in SECTIONS:
        charts = []
        for key in sections[section]:
            lines = {name: gridded(run.rows, key, size) for name, run in runs.items()}
            if any(finite(line.values) for line in lines.values()):
                smooth = not key.startswith("eval/")
                charts.append(overlay_chart(lines, **chart_words(key), smooth=smooth))

        if charts:
            drawings[section] = charts

    return drawings


def gridded(rows: Rows, key: str, size: int) -> MetricCurve:
    """Return the curve of a metric at multiples of `size` steps, the same for every run."""
    groups: dict[int, list[float]] = {}

    for row in rows:
        if key in row:
            # Up to the multiple: a run's last point may stand a little right of its last step.
            step = -(-step_of(row) // size) * size
            groups.setdefault(step, []).extend(column([row], key))

    values = [mean_or_none(numbers) for numbers in groups.values()]

    return MetricCurve(steps=list(groups), values=values, low=(), high=())


def summary_rows(runs: Runs) -> list[list[str]]:
    """Return the head and a row a run: its steps, reward, leading held-out score and speed."""
    leading = common_reward(runs)
    head = ["run", "steps", "reward or loss, first → last"]
    head += [f"held-out {leading}"] if leading else []
    table = [[*head, "samples/s", "s a step", "in all"]]

    for name, run in runs.items():
        change = MISSING
        if run.ends is not None:
            change = f"{pretty_number(run.ends.first)} → {pretty_number(run.ends.last)}"

        cells = [name, _steps(run), change]
        if leading:
            cells.append(_heldout(run, leading, runs))

        seconds = finite(step_seconds(row) for row in run.rows)
        speed = median(column(run.rows, SPEED))
        whole_s = run_seconds(run.rows)
        total = MISSING if whole_s is None else format_seconds(whole_s)
        table.append([*cells, pretty_number(speed), pretty_number(median(seconds)), total])

    return table


def _steps(run: RunRecord) -> str:
    is_short = run.last_step < run.num_steps
    return f"{run.last_step} of {run.num_steps}" if is_short else str(run.last_step)


def _heldout(run: RunRecord, reward: str, runs: Runs) -> str:
    evaluation = run.evaluation
    if evaluation is None or reward not in evaluation.reward_names:
        return MISSING

    return _format(runs, reward).value(evaluation.estimate(reward).mean)


def _format(runs: Runs, reward: str) -> RewardFormat:
    # One format for all: 0.5 beside 50 % could not be compared.
    return reward_format([run.evaluation for run in runs.values() if run.evaluation], reward)


def common_reward(runs: Runs) -> str | None:
    """Return the leading reward of the first run that has an evaluation; None without one."""
    for run in runs.values():
        if run.evaluation is not None:
            return leading_reward(run.evaluation, run.weights)

    return None


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The last evaluation of a run against that of another; both drew the same samples."""

    name: str
    against: str
    comparison: Comparison

    def is_clear(self, reward: str) -> bool:
        """Return True where the reward's change is more than noise."""
        names = self.comparison.reward_names
        return reward in names and self.comparison.difference(reward).is_clear


@dataclass(frozen=True, kw_only=True)
class Pairing:
    """All pairs. notes: why a run is in none."""

    pairs: Sequence[Pair]
    notes: Sequence[str]

    @property
    def rows(self) -> list[list[str]]:
        """Return the head and a row for each pair and reward; [] without a pair."""
        if not self.pairs:
            return []

        rows = [["run", "against", "reward", "step", "before", "now", "change", *DIFFERENCE_HEAD]]
        for pair in self.pairs:
            for cells in _difference_rows(pair.comparison):
                rows.append([pair.name, pair.against, *cells])

        return rows


def pair_up(runs: Runs) -> Pairing:
    """Pair each run's last evaluation with the first earlier run's that drew the same samples."""
    pairs: list[Pair] = []
    reasons: dict[str, str] = {}
    earlier: dict[str, Evaluation] = {}

    for name, run in runs.items():
        if run.evaluation is None:
            reasons[name] = f"{name} has no evaluation (eval.every)"
            continue

        for against, baseline in earlier.items():
            try:
                comparison = Comparison(evaluation=run.evaluation, baseline=baseline)
            except ValueError as error:
                reasons.setdefault(name, f"{name} against {against}: {error}")
                continue

            pairs.append(Pair(name=name, against=against, comparison=comparison))
            break

        earlier[name] = run.evaluation

    paired = {name for pair in pairs for name in (pair.name, pair.against)}
    notes = [reason for name, reason in reasons.items() if name not in paired]

    return Pairing(pairs=pairs, notes=notes)


def _difference_rows(comparison: Comparison) -> Iterator[list[str]]:
    evaluation = comparison.evaluation
    baseline = comparison.baseline

    for reward in comparison.reward_names:
        form = reward_format([baseline, evaluation], reward)
        before = form.value(baseline.estimate(reward).mean)
        now = form.value(evaluation.estimate(reward).mean)
        steps = f"{baseline.step} and {evaluation.step}"
        if baseline.step == evaluation.step:
            steps = str(evaluation.step)

        yield [reward, steps, before, now, *difference_cells(comparison, reward, None)]


def stage_rows(runs: Runs) -> list[list[str]]:
    """Return the head and a row a stage: median seconds of a step in every run."""
    stages = (*STAGES, UNTIMED)
    by_stage: dict[str, list[float | None]] = {stage: [] for stage in stages}
    whole = []
    speeds = []

    for run in runs.values():
        rows = [row for row in run.rows if step_seconds(row) is not None]
        steps = [stage_seconds(row) for row in rows]
        for stage in stages:
            by_stage[stage].append(median(step[stage] for step in steps))

        whole.append(median(step_seconds(row) for row in rows))
        speeds.append(median(column(run.rows, SPEED)))

    table = [["median s a step", *runs]]
    for stage, seconds in by_stage.items():
        if any(seconds):
            table.append([stage, *map(pretty_number, seconds)])

    table.append(["whole step", *map(pretty_number, whole)])
    table.append(["samples/s", *map(pretty_number, speeds)])

    return table


def headline(runs: Runs, pairing: Pairing) -> str:
    """Say in a sentence or two which run is ahead: in the held-out score, else in the reward."""
    leading = common_reward(runs)
    scores: dict[str, float] = {}
    if leading is not None:
        for name, run in runs.items():
            if run.evaluation is not None and leading in run.evaluation.reward_names:
                scores[name] = run.evaluation.estimate(leading).mean

    if leading is not None and len(scores) > 1:
        sentence = _ahead(f"Held-out {leading}", scores, _format(runs, leading).value)
        return f"{sentence} {_clearness(pairing, leading, num_runs=len(runs))}".strip()

    ends = {name: verdict(run.rows) for name, run in runs.items()}
    rewards = {name: end.last for name, end in ends.items() if end is not None}
    if len(rewards) > 1:
        return _ahead("The reward", rewards, pretty_number)

    return f"{len(runs)} runs with no score in common."


def _ahead(subject: str, scores: Mapping[str, float], write: Callable[[float], str]) -> str:
    best = max(scores, key=lambda name: scores[name])
    least = min(scores, key=lambda name: scores[name])
    if write(scores[best]) == write(scores[least]):
        everyone = "both" if len(scores) == 2 else f"all {len(scores)}"
        return f"{subject} ends at {write(scores[best])} in {everyone}."

    words = f"{subject} ends at {write(scores[best])} in {best}"
    if len(scores) == 2:
        return f"{words}, at {write(scores[least])} in {least}."

    return f"{words}, the highest of {len(scores)}; the lowest is {write(scores[least])}."


def _clearness(pairing: Pairing, reward: str, *, num_runs: int) -> str:
    """Say how many paired differences are more than noise; "" without a pair."""
    num_pairs = len(pairing.pairs)
    num_clear = sum(pair.is_clear(reward) for pair in pairing.pairs)
    if not num_pairs:
        return ""
    if num_pairs == 1:
        pair = pairing.pairs[0]
        # With more runs the one that is ahead may be in no pair.
        between = f" between {pair.against} and {pair.name}" if num_runs > 2 else ""
        verb = "clear" if num_clear else "not clear"
        return f"The difference{between} is {verb}."

    return f"{num_clear} of {num_pairs} paired differences are clear."
