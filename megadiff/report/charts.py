"""Compute the charts of a page: axes, SVG paths and labels. templates/charts.html draws them.

Positions are fractions of the plot, 0 at the left and the bottom. A chart is complete without
script; report.js adds the crosshair from the JSON in `data-chart`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, starmap
from statistics import fmean
from typing import Any, TypeVar

from megadiff.observe.evaluation import MeanEstimate
from megadiff.observe.metrics import Rows, column, finite, pretty_number, step_of

T = TypeVar("T")
Values = Sequence[float | None]
Drawing = dict[str, Any]  # what a template draws
Points = Sequence[tuple[float, float | None]]

MAX_POINTS = 400  # of a curve; beyond, neighbouring steps share a point
MIN_SMOOTHED = 20  # points; a trend through fewer would say more than they do
LOG_RANGE = 1e3  # a positive curve that spans more than this is drawn on a log axis
SEPARATOR = "|"
MAX_DIGITS = 9  # of a tick
VIEW = 1000  # the SVG's own units, both ways
# Classes part0 … part4 of the series of a bar chart. The first is the accent's colour: it goes to
# the last series, which is what a reader looks for.
COLOURS = (0, 4, 3, 2, 1)


@dataclass(frozen=True, kw_only=True)
class MetricCurve:
    """One metric over rising steps; all fields of one length.

    values: the mean of the steps that share a point, None where no value is finite.
    low, high: edges of the band around it; both empty without a band.
    """

    steps: Sequence[int]
    values: Values
    low: Values
    high: Values


def buckets(rows: Sequence[T], max_buckets: int) -> list[Sequence[T]]:
    """Split rows into at most `max_buckets` runs of equal length; the last may be shorter."""
    size = max(1, math.ceil(len(rows) / max_buckets))
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def mean_or_none(values: Values) -> float | None:
    """Return the mean of the finite values, None without any."""
    numbers = finite(values)
    return fmean(numbers) if numbers else None


def curve(rows: Rows, key: str, *, std_key: str | None = None) -> MetricCurve:
    """Return the curve of a metric over the rows that hold it.

    Its band is ± the metric `std_key` where that is given and present. Otherwise, where steps
    share a point, it is their least and greatest value.
    """
    logged = [row for row in rows if key in row]
    groups = buckets(logged, MAX_POINTS)
    values = [mean_or_none(column(group, key)) for group in groups]
    stds = [mean_or_none(column(group, std_key)) for group in groups] if std_key else []

    low: Values = ()
    high: Values = ()
    if finite(stds):
        ends = [
            (None, None) if mean is None or std is None else (mean - std, mean + std)
            for mean, std in zip(values, stds)
        ]
        low, high = zip(*ends)
    elif len(groups) < len(logged):
        numbers = [column(group, key) for group in groups]
        low = [min(group, default=None) for group in numbers]
        high = [max(group, default=None) for group in numbers]

    steps = [step_of(group[-1]) for group in groups]
    return MetricCurve(steps=steps, values=values, low=low, high=high)


def ticks(low: float, high: float, *, count: int = 4) -> list[float]:
    """Return about `count` multiples of 1, 2 or 5 · 10^n within [low, high], high > low."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    steps = [factor * power for factor in (1, 2, 5, 10)]
    step = min(steps, key=lambda step: abs(math.log(step / rough)))
    # The slack keeps a bound that is itself a multiple, but for rounding.
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A range low < high along one side of a plot; both are positive on a log axis."""

    low: float
    high: float
    is_log: bool = False

    def place(self, value: float) -> float:
        """Return the fraction of the axis at which `value` lies."""
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def places(self, values: Values) -> list[float | None]:
        """Return the fraction of every value; None stays None."""
        return [None if value is None else self.place(value) for value in values]

    def tick_texts(self) -> list[tuple[float, str]]:
        """Return each tick with its text, in as many digits as tell the ticks apart."""
        values = self.ticks()
        texts = [pretty_number(value) for value in values]
        for digits in range(4, MAX_DIGITS):
            if len(set(texts)) == len(texts):
                break
            texts = [f"{value:.{digits}g}".replace("-", "−") for value in values]
        return list(zip(values, texts))

    def ticks(self, *, count: int = 4) -> list[float]:
        """Return round values on the axis: powers of ten on a log axis."""
        if not self.is_log:
            return ticks(self.low, self.high, count=count)
        first = round(math.log10(self.low))
        last = round(math.log10(self.high))
        return [10.0**power for power in range(first, last + 1, math.ceil((last - first) / count))]


def value_axis(values: Sequence[float]) -> Axis:
    """Return an axis around the values with some air.

    It is logarithmic, by whole decades, where values are positive and far apart.
    """
    if not values:
        return Axis(low=0.0, high=1.0)

    low = min(values)
    high = max(values)
    if low > 0 and high / low > LOG_RANGE:
        first = math.floor(math.log10(low))
        last = math.ceil(math.log10(high))
        return Axis(low=10.0**first, high=10.0**last, is_log=True)

    air = (high - low) * 0.08 or abs(high) * 0.1 or 0.5
    # A quantity that never was negative gets no negative ticks.
    return Axis(low=max(0.0, low - air) if low >= 0 else low - air, high=high + air)


def step_axis(steps: Sequence[int], *, margin: float = 0.0) -> Axis:
    """Return the axis from the first to the last step, and `margin` beyond both."""
    low = steps[0] - margin if steps else 0
    high = steps[-1] + margin if steps else 1
    # A single step stands in the middle of an axis of one step.
    return Axis(low=low, high=high) if high > low else Axis(low=low - 0.5, high=high + 0.5)


def _point(x: float, y: float) -> str:
    # SVG counts y from the top.
    return f"{x * VIEW:.0f} {(1 - y) * VIEW:.0f}"


def _stretches(points: Iterable[tuple[float | None, ...]]) -> Iterator[list[tuple[Any, ...]]]:
    """Yield each run of neighbouring points without a None."""
    for has_gap, group in groupby(points, key=lambda point: None in point):
        if not has_gap:
            yield list(group)


def line_path(points: Points) -> str:
    """Return the SVG path through (x, y) fractions; a None breaks it."""
    return "".join("M" + "L".join(starmap(_point, stretch)) for stretch in _stretches(points))


def dots_path(points: Points) -> str:
    """Return the SVG path of the points without a neighbour, which line_path leaves invisible.

    They are lines of no length, which round caps turn into dots.
    """
    lone = [stretch[0] for stretch in _stretches(points) if len(stretch) == 1]
    return "".join(f"M{_point(x, y)}h0" for x, y in lone)


def band_path(xs: Sequence[float], lows: Values, highs: Values) -> str:
    """Return the SVG path of the area between two curves, one outline per stretch without None."""
    path = ""
    for stretch in _stretches(zip(xs, lows, highs)):
        # There along the top and back along the bottom. A lone point has no area.
        top = [_point(x, high) for x, _, high in stretch]
        bottom = [_point(x, low) for x, low, _ in stretch[::-1]]
        if len(stretch) > 1:
            path += "M" + "L".join(top + bottom) + "Z"
    return path


def running_mean(values: Values, *, window: int) -> list[float | None]:
    """Return the mean of the finite values within `window` around each point; None stays None."""
    half = window // 2
    means = []
    for index, value in enumerate(values):
        near = values[max(0, index - half) : index + half + 1]
        means.append(None if value is None else mean_or_none(near))
    return means


def trend(values: Values) -> list[float | None]:
    """Return the running mean of a long curve, [] for one that is too short."""
    if len(values) < MIN_SMOOTHED:
        return []
    return running_mean(values, window=max(5, len(values) // 12))


def _crosshair(x_axis: Axis, steps: Sequence[int], series: list) -> Drawing:
    """Return what report.js reads. series: (name, a text per step)."""
    # One string for all texts of a series: in an attribute each quotation mark takes five bytes.
    joined = [[name, SEPARATOR.join(texts)] for name, texts in series]
    return {"steps": steps, "ends": [x_axis.low, x_axis.high], "series": joined}


def line_chart(
    line: MetricCurve, *, title: str, key: str, note: str = "", kind: str = "", smooth: bool = False
) -> Drawing:
    """Return one metric's chart. smooth: draw a long curve faint, under its running mean.

    kind: a CSS class, `hero` for a wide one.
    """
    x_axis = step_axis(line.steps)
    y_axis = value_axis(finite([*line.values, *line.low, *line.high]))
    xs = [x_axis.place(step) for step in line.steps]
    points = list(zip(xs, y_axis.places(line.values)))

    means = trend(line.values) if smooth else []
    numbers = finite(line.values)
    latest = pretty_number(numbers[-1] if numbers else None)
    texts = [pretty_number(value) for value in line.values]

    return {
        "kind": kind,
        "title": title,
        "key": f"{key} · log scale" if y_axis.is_log else key,
        "note": note,
        "latest": latest,
        "label": f"{title}: {latest} at the last step" if numbers else f"{title}: no finite value",
        "num_missing": len(line.values) - len(numbers),
        "band": band_path(xs, y_axis.places(line.low), y_axis.places(line.high)),
        "line": line_path(points),
        "dots": dots_path(points),
        "trend": line_path(list(zip(xs, y_axis.places(means)))),
        "x_axis": x_axis,
        "y_axis": y_axis,
        "data": _crosshair(x_axis, line.steps, [[title, texts]]),
    }


def stacked_chart(
    steps: Sequence[int], stacks: Mapping[str, Sequence[float]], *, title: str, key: str, unit: str
) -> Drawing:
    """Return bars at `steps` (rising): stacks of name → values ≥ 0, from the bottom up."""
    pitch = min((later - step for step, later in zip(steps, steps[1:])), default=1)
    # Bars stand on their steps, so the axis reaches half a bar beyond both ends.
    x_axis = step_axis(steps, margin=pitch / 2)

    totals = [sum(values) for values in zip(*stacks.values())]
    series = []
    for name, values in {**stacks, "whole step": totals}.items():
        series.append([name, [f"{pretty_number(value)} {unit}" for value in values]])

    return {
        "title": title,
        "key": key,
        "steps": steps,
        "stacks": stacks,
        "width": pitch / (x_axis.high - x_axis.low) * (0.82 if len(steps) > 1 else 0.2),
        "x_axis": x_axis,
        # From zero: bars are compared by their length.
        "y_axis": Axis(low=0.0, high=max(totals, default=0.0) * 1.05 or 1.0),
        "data": _crosshair(x_axis, steps, series),
    }


def bar_chart(
    rows: Mapping[str, Sequence[MeanEstimate | None]],
    *,
    series: Sequence[str],
    title: str,
    key: str,
    is_share: bool = False,
    text: Callable[[float], str] = pretty_number,
) -> Drawing:
    """Return lying bars with their intervals: one mean or None per series in every row.

    is_share: the axis goes from 0 to 100 %. text: how values are written.
    Raises ValueError for more series than there are colours.
    """
    if len(series) > len(COLOURS):
        raise ValueError(
            f"{len(series)} series in one bar chart, at most {len(COLOURS)} can be told apart; "
            "show fewer"
        )

    # Bars start at 0, so the axis holds it.
    ends = [0.0]
    for means in rows.values():
        for mean in means:
            ends += finite([mean.mean, mean.low, mean.high]) if mean else []

    axis = Axis(low=min(ends) * 1.05, high=max(ends) * 1.05)
    if is_share or axis.low == axis.high:
        axis = Axis(low=0.0, high=1.0)

    return {
        "title": title,
        "key": key,
        "rows": rows,
        "series": series,
        "colours": [*COLOURS[1 : len(series)], COLOURS[0]],
        "text": text,
        "tick_text": "{:.0%}".format if is_share else pretty_number,
        "axis": axis,
    }


def overlay_chart(
    lines: Mapping[str, MetricCurve],
    *,
    title: str,
    key: str,
    note: str = "",
    kind: str = "",
    smooth: bool = False,
) -> Drawing:
    """Return one metric of several runs over each other: name → its curve.

    Steps may differ and end anywhere. smooth: draw the running means of long curves.
    kind: a CSS class, as of line_chart.
    """
    trends = {name: trend(line.values) if smooth else [] for name, line in lines.items()}
    drawn = {name: trends[name] or line.values for name, line in lines.items()}
    smoothed = "running mean" if any(trends.values()) else ""

    steps = sorted({step for line in lines.values() for step in line.steps})
    x_axis = step_axis(steps)
    numbers: list[float] = []
    for values in drawn.values():
        numbers += finite(values)
    y_axis = value_axis(numbers)

    curves = []
    series = []

    for name, line in lines.items():
        xs = [x_axis.place(step) for step in line.steps]
        points = list(zip(xs, y_axis.places(drawn[name])))
        curves.append({"name": name, "line": line_path(points), "dots": dots_path(points)})
        by_step = dict(zip(line.steps, drawn[name]))
        series.append([name, [pretty_number(by_step.get(step)) for step in steps]])

    return {
        "title": title,
        "key": f"{key} · log scale" if y_axis.is_log else key,
        "note": " · ".join(filter(None, (note, smoothed))),
        "kind": kind,
        "curves": curves,
        "x_axis": x_axis,
        "y_axis": y_axis,
        "data": _crosshair(x_axis, steps, series),
    }
