"""What tools/bench_gain.py makes of its runs: curves, figures per setting, a table, a plot.

Pure functions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from statistics import fmean

from megadiff.observe.metrics import Row, column, finite, format_number, median, metric_keys
from megadiff.report.charts import Axis, band_path, line_path, mean_or_none, value_axis

MISSING = "–"
ENTROPY = "eval/colour_entropy_bit"
_ALARM = re.compile(r"^\S+ W megadiff\.observe\.alarm: step (\d+): (.+)$", re.MULTILINE)
_EVALUATION = re.compile(r"evaluation at step (\d+), ([\d.]+) s:")


@dataclass(frozen=True, kw_only=True)
class Point:
    """A finished step; step 0 is the start.

    seconds: since the first step began; train_s: the same without what evaluations took. score,
    colour_entropy_bit: of the evaluation after this step, None without one.
    """

    step: int
    seconds: float
    train_s: float
    score: float | None
    colour_entropy_bit: float | None
    reward: float | None


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """One run.

    arguments: of `megadiff train`, without the seed and folder that every run has of its own.
    exit_code: 0 for a finished run, otherwise `error` says what failed. process_s: from start to
    exit of the process, start-up and evaluations included. inside_s: mean time/step_s, None before
    the first step. stages_s: median seconds per step of every time/* metric. alarms: what was
    logged, with its step.
    """

    setting: str
    seed: int
    arguments: list[str]
    metric: str
    exit_code: int
    error: str
    device: str
    process_s: float
    points: list[Point]
    inside_s: float | None
    stages_s: dict[str, float]
    alarms: list[tuple[int, str]]
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def scored(self) -> list[Point]:
        return [point for point in self.points if point.score is not None]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """A finished run in numbers.

    to_target: the first evaluation at or above the target, None when there was none. step_s: mean
    wall seconds per step without evaluations. between_s: the part of it that no time/step_s holds.
    """

    start: float
    end: float
    entropy: tuple[float | None, float | None]
    to_target: Point | None
    step_s: float
    between_s: float | None


def points_of(
    rows: Sequence[Row], stamps_s: Mapping[int, float], log: str, metric: str
) -> list[Point]:
    """Return the rows of a run on the clock of its first step.

    stamps_s: step → when its row was seen, on any one clock; rows that never were are left out.
    """
    evaluations = {int(step): float(seconds) for step, seconds in _EVALUATION.findall(log)}
    rows = [row for row in rows if int(row["step"]) in stamps_s]  # type: ignore[arg-type]
    if not rows:
        return []
    origin_s = stamps_s[int(rows[0]["step"])]  # type: ignore[arg-type]
    points: list[Point] = []
    evaluated_s = 0.0
    for row in rows:
        step = int(row["step"])  # type: ignore[arg-type]
        if points:  # the evaluation at the first step lies before the origin
            evaluated_s += evaluations.get(step, 0.0)
        seconds = stamps_s[step] - origin_s
        points.append(
            Point(
                step=step,
                seconds=round(seconds, 3),
                train_s=round(max(0.0, seconds - evaluated_s), 3),
                score=row.get(metric),
                colour_entropy_bit=row.get(ENTROPY),
                reward=row.get("reward/mean"),
            )
        )
    return points


def stage_medians(rows: Sequence[Row]) -> dict[str, float]:
    """Return time/* metric → its median over the steps."""
    keys = [key for key in metric_keys(rows) if key.startswith("time/")]
    return {key: value for key in keys if (value := median(column(rows, key))) is not None}


def mean_step_s(rows: Sequence[Row]) -> float | None:
    """Return the mean time/step_s of the steps, None without one."""
    return mean_or_none(column(rows, "time/step_s"))


def alarms_of(log: str) -> list[tuple[int, str]]:
    """Return (step, sentence) of every alarm in a run's log."""
    return [(int(step), sentence) for step, sentence in _ALARM.findall(log)]


def error_of(log: str) -> str:
    """Return the last line that begins with "error:", else the last line at all."""
    lines = [line.strip() for line in re.split(r"[\r\n]+", log) if line.strip()]
    errors = [line for line in lines if line.startswith("error:")]
    return (errors or lines or [""])[-1][:300]


def figures_of(run: RunResult, target: float) -> Figures | None:
    """Return the figures of a run.

    None for one that failed, or that has no evaluation before and after its steps.
    """
    scored = run.scored
    if run.exit_code or len(scored) < 2:
        return None
    first, last = scored[0], run.points[-1]
    step_s = last.train_s / max(1, last.step - first.step)
    return Figures(
        start=first.score,  # type: ignore[arg-type]
        end=scored[-1].score,  # type: ignore[arg-type]
        entropy=(first.colour_entropy_bit, scored[-1].colour_entropy_bit),
        to_target=next((point for point in scored if point.score >= target), None),  # type: ignore[operator]
        step_s=step_s,
        between_s=None if run.inside_s is None else step_s - run.inside_s,
    )


def by_setting(runs: Sequence[RunResult]) -> dict[str, list[RunResult]]:
    """Return setting → its runs, both in the order given."""
    return {
        name: [run for run in runs if run.setting == name]
        for name in dict.fromkeys(run.setting for run in runs)
    }


def table(runs: Sequence[RunResult], *, target: float) -> str:
    """Return a markdown table, a row a setting: means over its finished seeds.

    Each seed is shown where it matters. Below it: what failed, and which alarms were logged.
    """
    goal = f"{100 * target:g} %" if 0 <= target <= 1 else format_number(target)
    head = ["setting", "start", "end (per seed)", "gain", f"steps to {goal}", f"s to {goal}"]
    head += ["s/step", "colour entropy, bit", "alarms"]
    lines = [head, ["---"] * len(head)]
    lines += [_row(name, group, target) for name, group in by_setting(runs).items()]
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    notes = [
        f"{run.setting}, seed {run.seed}: failed, exit code {run.exit_code}: {run.error}"
        for run in runs
        if run.exit_code
    ]
    notes += [
        f"{run.setting}, seed {run.seed}, step {step}: {said}"
        for run in runs
        for step, said in run.alarms
    ]
    return text + "".join(f"\n- {note}" for note in notes) + ("\n" if notes else "")


def _row(name: str, runs: Sequence[RunResult], target: float) -> list[str]:
    found = [figures for run in runs if (figures := figures_of(run, target)) is not None]
    num_bad = len(runs) - len(found)
    name += f" ({num_bad} of {len(runs)} failed)" if num_bad else ""
    alarmed = [run for run in runs if run.alarms]
    first_step = min((step for run in alarmed for step, _ in run.alarms), default=0)
    alarms = f"{len(alarmed)} of {len(runs)}, from step {first_step}" if alarmed else "none"
    if not found:
        return [name, *[MISSING] * 7, alarms]
    start, end = fmean(each.start for each in found), fmean(each.end for each in found)
    reached = [each.to_target for each in found]
    return [
        name,
        score_text(start),
        f"{score_text(end)} ({', '.join(score_text(each.end) for each in found)})",
        gain_text(start, end),
        ", ".join(str(point.step) if point else MISSING for point in reached),
        ", ".join(f"{point.train_s:.0f}" if point else MISSING for point in reached),
        format_number(fmean(each.step_s for each in found)),
        " → ".join(_mean_text([each.entropy[end] for each in found]) for end in (0, 1)),
        alarms,
    ]


def _mean_text(values: Sequence[float | None]) -> str:
    known = finite(values)
    return f"{fmean(known):.2f}" if known else MISSING


def score_text(score: float) -> str:
    """Return 51.4 % of a score within 0 … 1, three digits of any other."""
    return f"{100 * score:.1f} %" if 0 <= score <= 1 else format_number(score)


def gain_text(start: float, end: float) -> str:
    """Return the gain, in points where both are shares."""
    both_shares = 0 <= start <= 1 and 0 <= end <= 1
    return f"{100 * (end - start):+.1f} points" if both_shares else f"{end - start:+.3g}"


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A setting's score at the evaluations that all its finished runs share: mean, least and
    greatest over the seeds; seconds: mean train_s.
    """

    name: str
    steps: list[int]
    seconds: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


def curves(runs: Sequence[RunResult]) -> list[Curve]:
    """Return a curve for every setting with a finished run."""
    found = []
    for name, group in by_setting(runs).items():
        scores = [
            {point.step: point for point in run.scored}
            for run in group
            if not run.exit_code and run.scored
        ]
        if not scores:
            continue
        steps = sorted(set.intersection(*(set(each) for each in scores)))
        columns = [[each[step] for each in scores] for step in steps]
        values = [[point.score for point in points] for points in columns]
        found.append(
            Curve(
                name=name,
                steps=steps,
                seconds=[fmean(point.train_s for point in points) for points in columns],
                mean=[fmean(each) for each in values],  # type: ignore[arg-type]
                low=[min(each) for each in values],  # type: ignore[type-var]
                high=[max(each) for each in values],  # type: ignore[type-var]
            )
        )
    return found


COLOURS = ("#0b7a75", "#c2571a", "#3b5bdb", "#a61e4d", "#5c940d", "#7048e8", "#495057", "#e0a800")
_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP, _BOTTOM = 960, 400, 56, 64, 56, 44  # pixels
_STYLE = """
text { font: 12px ui-sans-serif, system-ui, "Segoe UI", Roboto, sans-serif; fill: #5d6566; }
.title { font-size: 16px; font-weight: 600; fill: #16191a; }
.end { text-anchor: end; }
.middle { text-anchor: middle; }
path {
  fill: none; vector-effect: non-scaling-stroke;
  stroke-linejoin: round; stroke-linecap: round; stroke-width: 2;
}
.grid { stroke: #e6e7e2; stroke-width: 1; }
.target { stroke: #8f9797; stroke-width: 1; stroke-dasharray: 4 4; }
.band { stroke: none; opacity: .13; }
"""


def plot(found: Sequence[Curve], *, metric: str, target: float) -> str:
    """Return an SVG image: the score over steps and over seconds.

    The mean of the seeds is a line, their range a band.
    """
    ends = [value for each in found for value in (*each.low, *each.high)]
    y_axis = value_axis([*ends, target] if ends else [])
    width = (_WIDTH - _LEFT - _GAP - 16) / 2
    panels = [
        ("step", lambda each: each.steps),
        ("seconds, without evaluations", lambda each: each.seconds),
    ]
    body = "".join(
        _panel(
            found,
            xs,
            name=name,
            left=_LEFT + number * (width + _GAP),
            width=width,
            y_axis=y_axis,
            target=target,
        )
        for number, (name, xs) in enumerate(panels)
    )
    legend, x = "", float(_LEFT)
    for number, each in enumerate(found):
        colour = COLOURS[number % len(COLOURS)]
        legend += f'<rect x="{x}" y="38" width="12" height="12" rx="3" fill="{colour}"/>'
        legend += f'<text x="{x + 18}" y="48">{escape(each.name)}</text>'
        x += 44 + 6.6 * len(each.name)
    title = (
        f'<text class="title" x="{_LEFT}" y="24">{escape(metric)}: mean and range over seeds</text>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'width="{_WIDTH}" height="{_HEIGHT}">'
        f'<style>{_STYLE}</style><rect width="100%" height="100%" '
        f'fill="#ffffff"/>{title}{legend}{body}</svg>\n'
    )


def _panel(
    found: Sequence[Curve],
    xs_of: Callable[[Curve], Sequence[float]],
    *,
    name: str,
    left: float,
    width: float,
    y_axis: Axis,
    target: float,
) -> str:
    last = max((x for each in found for x in xs_of(each)), default=0) or 1
    x_axis, height = Axis(low=0, high=last), _HEIGHT - _TOP - _BOTTOM
    marks = "".join(
        f'<path class="grid" d="M0 {_down(y_axis, tick)}H1000"/>' for tick in y_axis.ticks()
    )
    marks += f'<path class="target" d="M0 {_down(y_axis, target)}H1000"/>' if found else ""
    for number, each in enumerate(found):
        colour, xs = COLOURS[number % len(COLOURS)], [x_axis.place(x) for x in xs_of(each)]
        low, high, mean = (
            [y_axis.place(value) for value in values] for values in (each.low, each.high, each.mean)
        )
        marks += f'<path class="band" style="fill:{colour}" d="{band_path(xs, low, high)}"/>'
        marks += f'<path style="stroke:{colour}" d="{line_path(list(zip(xs, mean)))}"/>'
    texts = ""
    for tick in y_axis.ticks():
        y = _TOP + height * _down(y_axis, tick) / 1000 + 4
        texts += f'<text class="end" x="{left - 8:.1f}" y="{y:.1f}">{_tick(tick, y_axis)}</text>'
    texts += "".join(
        f'<text class="middle" x="{left + width * x_axis.place(tick):.1f}" '
        f'y="{_TOP + height + 18}">{tick:g}</text>'
        for tick in x_axis.ticks(count=5)
    )
    texts += (
        f'<text class="middle" x="{left + width / 2:.1f}" y="{_TOP + height + 36}">{name}</text>'
    )
    return (
        f'<svg x="{left:.1f}" y="{_TOP}" width="{width:.1f}" height="{height}" viewBox="0 0 '
        '1000 1000" '
        f'preserveAspectRatio="none" overflow="visible">{marks}</svg>{texts}'
    )


def _down(axis: Axis, value: float) -> float:
    return round(1000 * (1 - axis.place(value)), 1)


def _tick(value: float, axis: Axis) -> str:
    return f"{value:.0%}" if axis.low >= 0 and axis.high <= 1.1 else format_number(value)
