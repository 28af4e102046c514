"""Compute the charts of a page: axes, SVG paths and labels. templates/charts.html draws them.

Positions are fractions of the plot, 0 at the left and the bottom. A chart is complete without
script; report.js adds the crosshair from the JSON in `data-chart`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeVar

from megadiff.observe.evaluation import MeanEstimate
from megadiff.observe.metrics import Row, column, finite, pretty_number, step_of

T = TypeVar("T")
Values = Sequence[float | None]
Points = Sequence[tuple[float, float | None]]

MAX_POINTS = 600  # of a curve; beyond, neighbouring steps share a point
MIN_SMOOTHED = 20  # points; a trend through fewer would say more than they do
LOG_RANGE = 1e3  # a positive curve that spans more than this is drawn on a log axis
VIEW = 1000  # the SVG's own units, both ways
# Classes part0 … part4 of the series of a bar chart. The last series has the accent's colour.
LAST_COLOUR = 0
EARLIER_COLOURS = (4, 3, 2, 1)


@dataclass(frozen=True, kw_only=True)
class MetricCurve:
    """One metric over rising steps; all fields of one length.

    values: the mean of the steps that share a point, None where no value is finite.
    low, high: edges of the band around it; both None without a band.
    """

    steps: tuple[int, ...]
    values: tuple[float | None, ...]
    low: tuple[float | None, ...] | None = None
    high: tuple[float | None, ...] | None = None


def buckets(rows: Sequence[T], max_buckets: int) -> list[Sequence[T]]:
    """Split rows into at most `max_buckets` runs of equal length; the last may be shorter."""
    size = max(1, math.ceil(len(rows) / max_buckets))
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def mean_or_none(values: Values) -> float | None:
    """Return the mean of the finite values, None without any."""
    numbers = finite(values)
    return fmean(numbers) if numbers else None


def curve(rows: Sequence[Row], key: str, *, std_key: str | None = None) -> MetricCurve:
    """Return the curve of a metric over the rows that hold it.

    Its band is ± the metric `std_key` where that is given and present. Otherwise, where steps
    share a point, it is their least and greatest value.
    """
    logged = [row for row in rows if key in row]
    groups = buckets(logged, MAX_POINTS)
    values = [mean_or_none(column(group, key)) for group in groups]
    stds = [mean_or_none(column(group, std_key)) for group in groups] if std_key else []
    low = high = None
    if finite(stds):
        ends = [
            (None, None) if mean is None or std is None else (mean - std, mean + std)
            for mean, std in zip(values, stds)
        ]
        low, high = zip(*ends)
    elif len(groups) < len(logged):
        low = tuple(min(finite(column(group, key)), default=None) for group in groups)
        high = tuple(max(finite(column(group, key)), default=None) for group in groups)
    steps = tuple(step_of(group[-1]) for group in groups)
    return MetricCurve(steps=steps, values=tuple(values), low=low, high=high)


def ticks(low: float, high: float, *, count: int = 4) -> list[float]:
    """Return about `count` multiples of 1, 2 or 5 · 10^n within [low, high], high > low."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    steps = [power, 2 * power, 5 * power, 10 * power]
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

    def ticks(self, *, count: int = 4) -> list[float]:
        """Return round values on the axis: powers of ten on a log axis."""
        if not self.is_log:
            return ticks(self.low, self.high, count=count)
        first = round(math.log10(self.low))
        last = round(math.log10(self.high))
        return [10.0**power for power in range(first, last + 1, math.ceil((last - first) / count))]


def value_axis(values: Sequence[float], *, from_zero: bool = False) -> Axis:
    """Return an axis around the values with some air.

    It is logarithmic, by whole decades, where values are positive and far apart.
    """
    if not values:
        return Axis(low=0.0, high=1.0)
    low = min(values)
    high = max(values)
    if from_zero:
        return Axis(low=0.0, high=high * 1.05 or 1.0)
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
    return f"{x * VIEW:.1f} {(1 - y) * VIEW:.1f}"


def line_path(points: Points) -> str:
    """Return the SVG path through (x, y) fractions; a None breaks it."""
    path = ""
    is_drawing = False
    for x, y in points:
        if y is not None:
            path += ("L" if is_drawing else "M") + _point(x, y)
        is_drawing = y is not None
    return path


def dots_path(points: Points) -> str:
    """Return the SVG path of the points without a neighbour, which line_path leaves invisible.

    They are lines of no length, which round caps turn into dots.
    """
    heights = [None, *(y for _, y in points), None]
    path = ""
    for (x, y), before, after in zip(points, heights, heights[2:]):
        if y is not None and before is None and after is None:
            path += f"M{_point(x, y)}h0"
    return path


def band_path(xs: Sequence[float], lows: Values, highs: Values) -> str:
    """Return the SVG path of the area between two curves, one outline per stretch without None."""
    path = ""
    top: list[str] = []
    bottom: list[str] = []
    for x, low, high in [*zip(xs, lows, highs), (0.0, None, None)]:
        if low is not None and high is not None:
            top.append(_point(x, high))
            bottom.append(_point(x, low))
            continue
        if len(top) > 1:
            path += "M" + "L".join(top + bottom[::-1]) + "Z"
        top = []
        bottom = []
    return path


def running_mean(values: Values, *, window: int) -> list[float | None]:
    """Return the mean of the finite values within `window` around each point; None stays None."""
    half = window // 2
    means = []
    for index, value in enumerate(values):
        near = values[max(0, index - half) : index + half + 1]
        means.append(None if value is None else mean_or_none(near))
    return means


def _crosshair(x_axis: Axis, steps: Sequence[int], series: list) -> dict[str, Any]:
    """Return what report.js reads. series: [name, one text per step]."""
    xs = [round(x_axis.place(step), 5) for step in steps]
    return {"steps": steps, "x": xs, "series": series}


def line_chart(
    line: MetricCurve, *, title: str, key: str, note: str = "", kind: str = "", smooth: bool = False
) -> dict[str, Any]:
    """Return one metric's chart. smooth: draw a long curve faint, under its running mean.

    kind: a CSS class, `hero` for a wide one.
    """
    low = line.low or ()
    high = line.high or ()
    x_axis = step_axis(line.steps)
    y_axis = value_axis(finite([*line.values, *low, *high]))
    xs = [x_axis.place(step) for step in line.steps]
    points = list(zip(xs, y_axis.places(line.values)))
    trend = ""
    if smooth and len(line.values) >= MIN_SMOOTHED:
        means = running_mean(line.values, window=max(5, len(line.values) // 12))
        trend = line_path(list(zip(xs, y_axis.places(means))))
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
        "band": band_path(xs, y_axis.places(low), y_axis.places(high)),
        "line": line_path(points),
        "dots": dots_path(points),
        "trend": trend,
        "x_axis": x_axis,
        "y_axis": y_axis,
        "data": _crosshair(x_axis, line.steps, [[title, texts]]),
    }


def stacked_chart(
    steps: Sequence[int], stacks: Mapping[str, Sequence[float]], *, title: str, key: str, unit: str
) -> dict[str, Any]:
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
        "y_axis": value_axis(totals, from_zero=True),
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
) -> dict[str, Any]:
    """Return lying bars with their intervals: one mean or None per series in every row.

    is_share: the axis goes from 0 to 100 %. text: how values are written.
    Raises ValueError for more series than there are colours.
    """
    max_series = len(EARLIER_COLOURS) + 1
    if len(series) > max_series:
        raise ValueError(
            f"{len(series)} series in one bar chart, at most {max_series} can be told apart; "
            "show fewer"
        )
    return {
        "title": title,
        "key": key,
        "rows": rows,
        "series": series,
        "colours": [*EARLIER_COLOURS[: len(series) - 1], LAST_COLOUR],
        "text": text,
        "tick_text": "{:.0%}".format if is_share else pretty_number,
        "axis": Axis(low=0.0, high=1.0) if is_share else _bar_axis(rows),
    }


def _bar_axis(rows: Mapping[str, Sequence[MeanEstimate | None]]) -> Axis:
    """Return an axis that holds 0 and all intervals."""
    ends = [0.0]
    for means in rows.values():
        for mean in means:
            ends += finite([mean.mean, mean.low, mean.high]) if mean else []
    low = min(ends) * 1.05
    high = max(ends) * 1.05
    return Axis(low=low, high=high) if high > low else Axis(low=0.0, high=1.0)
