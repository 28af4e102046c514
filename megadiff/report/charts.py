"""Charts of the report as HTML: the curve is an SVG that stretches, the words around it are text that does not.

A chart is complete without script; report.js adds the crosshair, from the JSON in `data-chart`. Positions are
fractions of the plot, 0 at the left and the bottom.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean
from typing import TypeVar

from megadiff.observe.metrics import Row, column, finite, pretty_number

T = TypeVar("T")

MAX_POINTS = 600  # of a curve; beyond, neighbouring steps share a point
MAX_BARS = 80
_LOG_RANGE = 1e3  # a positive curve that spans more than this is drawn on a log axis
_VIEW = 1000  # the SVG's own units, both ways


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One metric over steps. values: the mean of the steps that share a point, None where it has no finite value.
    low, high: edges of the band around it, or None without a band. All of one length; steps rise."""

    steps: tuple[int, ...]
    values: tuple[float | None, ...]
    low: tuple[float | None, ...] | None = None
    high: tuple[float | None, ...] | None = None


def buckets(rows: Sequence[T], max_buckets: int) -> list[Sequence[T]]:
    """The rows in at most `max_buckets` runs of neighbours of equal length (the last may be shorter)."""
    size = max(1, math.ceil(len(rows) / max_buckets))
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def mean_or_none(values: Sequence[float | None]) -> float | None:
    numbers = finite(values)
    return fmean(numbers) if numbers else None


def curve(rows: Sequence[Row], key: str, *, std_key: str | None = None) -> Curve:
    """The curve of a metric over the rows that hold it. Its band is ± std_key's metric where given and present;
    otherwise, where steps share a point, their least and greatest value."""
    having = [row for row in rows if key in row]
    groups = buckets(having, MAX_POINTS)
    values = tuple(mean_or_none(column(group, key)) for group in groups)
    low = high = None
    stds = [mean_or_none(column(group, std_key)) for group in groups] if std_key else []
    if finite(stds):
        pairs = [
            (value, std) if None not in (value, std) else (None, None)
            for value, std in zip(values, stds)
        ]
        low = tuple(None if value is None else value - std for value, std in pairs)
        high = tuple(None if value is None else value + std for value, std in pairs)
    elif len(groups) < len(having):
        low = tuple(min(finite(column(group, key)), default=None) for group in groups)
        high = tuple(max(finite(column(group, key)), default=None) for group in groups)
    return Curve(
        steps=tuple(int(group[-1]["step"]) for group in groups), values=values, low=low, high=high
    )


def ticks(low: float, high: float, *, count: int = 4) -> list[float]:
    """About `count` multiples of 1, 2 or 5 · 10^n within [low, high], high > low."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = min(
        (multiple * power for multiple in (1, 2, 5, 10)),
        key=lambda step: abs(math.log(step / rough)),
    )
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A range of values, low < high, drawn along one side of a plot; both positive when it is logarithmic."""

    low: float
    high: float
    is_log: bool = False

    def place(self, value: float) -> float:
        """Fraction of the axis at which `value` lies."""
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, *, count: int = 4) -> list[float]:
        if not self.is_log:
            return ticks(self.low, self.high, count=count)
        first, last = round(math.log10(self.low)), round(math.log10(self.high))
        return [10.0**power for power in range(first, last + 1, math.ceil((last - first) / count))]


def value_axis(values: Sequence[float], *, from_zero: bool = False) -> Axis:
    """An axis around the values with some air; logarithmic, by whole decades, where they are positive and far apart."""
    if not values:
        return Axis(low=0.0, high=1.0)
    low, high = min(values), max(values)
    if from_zero:
        return Axis(low=0.0, high=high * 1.05 or 1.0)
    if low > 0 and high / low > _LOG_RANGE:
        return Axis(
            low=10.0 ** math.floor(math.log10(low)),
            high=10.0 ** math.ceil(math.log10(high)),
            is_log=True,
        )
    air = (high - low) * 0.08 or abs(high) * 0.1 or 0.5
    # A quantity that never was negative gets no negative ticks.
    return Axis(low=max(0.0, low - air) if low >= 0 else low - air, high=high + air)


def step_axis(steps: Sequence[int]) -> Axis:
    """From the first to the last step; half a step around a single one."""
    low, high = (steps[0], steps[-1]) if steps else (0, 1)
    return Axis(low=low, high=high) if high > low else Axis(low=low - 0.5, high=high + 0.5)


def _point(x: float, y: float) -> str:
    return f"{x * _VIEW:.1f} {(1 - y) * _VIEW:.1f}"


def line_path(points: Sequence[tuple[float, float | None]]) -> str:
    """SVG path through (x, y) fractions; a None breaks it. A point between two Nones is left to dots_path."""
    parts, is_down = [], False
    for x, y in points:
        if y is not None:
            parts.append(("L" if is_down else "M") + _point(x, y))
        is_down = y is not None
    return "".join(parts)


def dots_path(points: Sequence[tuple[float, float | None]]) -> str:
    """SVG path of the points without a neighbour: lines of no length, which round caps turn into dots."""
    padded = [None, *(y for _, y in points), None]
    return "".join(
        f"M{_point(x, y)}h0"
        for index, (x, y) in enumerate(points)
        if y is not None and padded[index] is None and padded[index + 2] is None
    )


def band_path(
    xs: Sequence[float], lows: Sequence[float | None], highs: Sequence[float | None]
) -> str:
    """SVG path of the area between two curves, one piece per stretch without None."""
    parts: list[str] = []
    stretch: list[tuple[float, float, float]] = []
    for x, low, high in [*zip(xs, lows, highs), (0.0, None, None)]:
        if low is not None and high is not None:
            stretch.append((x, low, high))
            continue
        if len(stretch) > 1:
            edge = [_point(x, high) for x, _, high in stretch] + [
                _point(x, low) for x, low, _ in reversed(stretch)
            ]
            parts.append("M" + "L".join(edge) + "Z")
        stretch = []
    return "".join(parts)


def running_mean(values: Sequence[float | None], *, window: int) -> list[float | None]:
    """Mean of the finite values within `window` around each point; None stays None."""
    half = window // 2
    return [
        None if value is None else mean_or_none(values[max(0, index - half) : index + half + 1])
        for index, value in enumerate(values)
    ]


def _plot(*, x_axis: Axis, y_axis: Axis, marks: str) -> str:
    """Axes with ticks and labels, around the SVG marks."""
    x_ticks = [tick for tick in x_axis.ticks(count=6) if float(tick).is_integer()]
    y_ticks = [(y_axis.place(tick), pretty_number(tick)) for tick in y_axis.ticks()]
    grid = "".join(f'<path class="grid" d="M{_point(0, place)}H{_VIEW}"/>' for place, _ in y_ticks)
    y_labels = "".join(
        f'<span style="bottom:{place:.2%}">{label}</span>' for place, label in y_ticks
    )
    x_labels = "".join(
        f'<span style="left:{x_axis.place(tick):.2%}">{tick:.0f}</span>' for tick in x_ticks
    )
    svg = f'<svg viewBox="0 0 {_VIEW} {_VIEW}" preserveAspectRatio="none" aria-hidden="true">{grid}{marks}</svg>'
    return (
        f'<div class="plot"><div class="ys">{y_labels}</div><div class="area">{svg}</div>'
        f'<div class="xname">step</div><div class="xs">{x_labels}</div></div>'
    )


def _figure(*, kind: str, head: str, plot: str, data: dict[str, object], label: str) -> str:
    payload = escape(json.dumps(data, separators=(",", ":"), ensure_ascii=False))
    return (
        f'<figure class="chart {kind}" role="group" aria-label="{escape(label)}" data-chart="{payload}">'
        f"<figcaption>{head}</figcaption>{plot}</figure>"
    )


def line_chart(
    line: Curve, *, title: str, key: str, note: str = "", kind: str = "", smooth: bool = False
) -> str:
    """One metric as a figure: title, key, latest value, curve with its band. smooth: the values are drawn faint under
    their running mean when there are at least 20."""
    numbers = finite([*line.values, *(line.low or ()), *(line.high or ())])
    x_axis, y_axis = step_axis(line.steps), value_axis(numbers)
    xs = [x_axis.place(step) for step in line.steps]

    def heights(values: Sequence[float | None]) -> list[float | None]:
        return [None if value is None else y_axis.place(value) for value in values]

    smooth = smooth and len(line.values) >= 20
    marks = ""
    if line.low is not None and line.high is not None:
        marks += f'<path class="band" d="{band_path(xs, heights(line.low), heights(line.high))}"/>'
    raw_class = "line raw" if smooth else "line"
    points = list(zip(xs, heights(line.values)))
    marks += f'<path class="{raw_class}" d="{line_path(points)}"/><path class="dots" d="{dots_path(points)}"/>'
    if smooth:
        means = running_mean(line.values, window=max(5, len(line.values) // 12))
        marks += f'<path class="trend" d="{line_path(list(zip(xs, heights(means))))}"/>'
    missing = len(line.values) - len(finite(line.values))
    known = finite(line.values)
    latest = pretty_number(known[-1] if known else None)
    head = (
        f'<span class="title">{escape(title)}</span><output class="now">{latest}</output>'
        f"<code>{escape(key)}{' · log scale' if y_axis.is_log else ''}</code>"
    )
    head += f'<span class="flag">{missing} not finite</span>' if missing else ""
    head += f'<span class="note">{escape(note)}</span>' if note else ""
    data = {
        "steps": line.steps,
        "x": [round(x, 5) for x in xs],
        "series": [[title, _texts(line.values)]],
    }
    label = f"{title}: {latest} at the last step" if known else f"{title}: no finite value"
    return _figure(
        kind=kind,
        head=head,
        plot=_plot(x_axis=x_axis, y_axis=y_axis, marks=marks),
        data=data,
        label=label,
    )


def _texts(values: Sequence[float | None]) -> list[str]:
    return [pretty_number(value) for value in values]


def stacked_chart(
    steps: Sequence[int],
    parts: Sequence[tuple[str, Sequence[float]]],
    *,
    title: str,
    key: str,
    unit: str,
) -> str:
    """Bars at `steps` (rising), each the stack of (name, values ≥ 0) from the bottom up, coloured by position."""
    totals = [sum(values) for values in zip(*(values for _, values in parts))]
    pitch = min((later - step for step, later in zip(steps, steps[1:])), default=1)
    # Bars stand on their steps, so the axis reaches half a bar beyond both ends.
    x_axis = Axis(low=steps[0] - pitch / 2, high=steps[-1] + pitch / 2)
    y_axis = value_axis(totals, from_zero=True)
    width = pitch / (x_axis.high - x_axis.low)
    xs = [x_axis.place(step) for step in steps]
    gap = width * (0.18 if len(steps) > 1 else 0.8)
    bases = [0.0] * len(steps)
    marks = ""
    for number, (_, values) in enumerate(parts):
        for index, value in enumerate(values):
            bottom, top = y_axis.place(bases[index]), y_axis.place(bases[index] + value)
            x = xs[index] - (width - gap) / 2
            marks += (
                f'<rect class="part{number}" x="{x * _VIEW:.1f}" y="{(1 - top) * _VIEW:.1f}" '
                f'width="{(width - gap) * _VIEW:.1f}" height="{(top - bottom) * _VIEW:.1f}"/>'
            )
            bases[index] += value
    legend = "".join(
        f'<li><i class="part{n}"></i>{escape(name)}</li>' for n, (name, _) in enumerate(parts)
    )
    head = f'<span class="title">{escape(title)}</span><code>{escape(key)}</code><ul class="legend">{legend}</ul>'
    series = [
        [name, [f"{pretty_number(value)} {unit}" for value in values]] for name, values in parts
    ]
    series.append(["whole step", [f"{pretty_number(total)} {unit}" for total in totals]])
    data = {"steps": list(steps), "x": [round(x, 5) for x in xs], "series": series}
    plot = _plot(x_axis=x_axis, y_axis=y_axis, marks=marks)
    return _figure(kind="stacked", head=head, plot=plot, data=data, label=f"{title} over steps")


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One bar from 0 to `value`, with the ends of its error bar, if it has one."""

    value: float
    low: float | None = None
    high: float | None = None


def bar_chart(
    groups: Sequence[tuple[str, Sequence[Bar | None]]],
    *,
    series: Sequence[str],
    title: str,
    key: str,
    note: str = "",
    axis: Axis | None = None,
    text: Callable[[float], str] = pretty_number,
    tick_text: Callable[[float], str] = pretty_number,
) -> str:
    """Bars lying in rows: a row a group (name, one Bar or None per series), its bars one under the other.

    The last series has the accent's colour, earlier ones recede; at most 5. axis: of the values, holds 0; by default
    from 0, or the least, to the largest. text, tick_text: how a value and a place on the axis are written.
    """
    places = _series_places(len(series))
    bars = [bar for _, row in groups for bar in row if bar is not None]
    axis = axis or _bar_axis(bars)
    tick_places = [(axis.place(tick), tick_text(tick)) for tick in axis.ticks()]
    rows = "".join(
        _bar_row(name, row, axis, places, [place for place, _ in tick_places], text)
        for name, row in groups
    )
    labels = "".join(
        f'<span style="left:{place:.2%}">{escape(label)}</span>' for place, label in tick_places
    )
    legend = "".join(
        f'<li><i class="part{place}"></i>{escape(name)}</li>' for place, name in zip(places, series)
    )
    head = f'<span class="title">{escape(title)}</span><code>{escape(key)}</code>'
    head += f'<span class="note">{escape(note)}</span>' if note else ""
    head += f'<ul class="legend">{legend}</ul>' if len(series) > 1 else ""
    return (
        f'<figure class="card bars" role="group" aria-label="{escape(title)}"><figcaption>{head}</figcaption>{rows}'
        f'<div class="row"><span></span><div class="xs">{labels}</div></div></figure>'
    )


def _bar_axis(bars: Sequence[Bar]) -> Axis:
    ends = [end for bar in bars for end in (bar.value, bar.low, bar.high) if end is not None]
    low, high = min([0.0, *ends]), max([0.0, *ends])
    return Axis(low=low * 1.05, high=high * 1.05) if high > low else Axis(low=0.0, high=1.0)


def _series_places(count: int) -> list[int]:
    """Colour of each series: the last has the accent, earlier ones grow fainter backwards."""
    if count > 5:
        raise ValueError(
            f"{count} series in one bar chart, at most 5 can be told apart; show fewer"
        )
    return [4, 3, 2, 1][: max(0, count - 1)] + [0]


def _bar_row(
    name: str,
    bars: Sequence[Bar | None],
    axis: Axis,
    places: Sequence[int],
    tick_places: Sequence[float],
    text: Callable[[float], str],
) -> str:
    pitch = _VIEW / len(bars)
    marks = "".join(
        f'<path class="grid" d="M{place * _VIEW:.1f} 0V{_VIEW}"/>' for place in tick_places
    )
    values = ""
    for number, (place, bar) in enumerate(zip(places, bars, strict=True)):
        values += f"<b>{escape(text(bar.value)) if bar else '–'}</b>"
        if bar is None:
            continue
        middle = (number + 0.5) * pitch
        left, right = sorted((axis.place(0.0) * _VIEW, axis.place(bar.value) * _VIEW))
        marks += (
            f'<rect class="part{place}" x="{left:.1f}" y="{middle - 0.4 * pitch:.1f}" width="{right - left:.1f}" '
            f'height="{0.8 * pitch:.1f}"/>'
        )
        if bar.low is not None and bar.high is not None:
            low, high = axis.place(bar.low) * _VIEW, axis.place(bar.high) * _VIEW
            marks += f'<path class="whisker" d="M{low:.1f} {middle:.1f}H{high:.1f}"/>'
    svg = f'<svg viewBox="0 0 {_VIEW} {_VIEW}" preserveAspectRatio="none" aria-hidden="true">{marks}</svg>'
    height = f"height:{18 * len(bars) + 4}px"
    return (
        f'<div class="row"><span class="name">{escape(name)}</span><div class="lane" style="{height}">{svg}</div>'
        f'<span class="values">{values}</span></div>'
    )
