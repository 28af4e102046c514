import json
import re
from html import unescape

import pytest

from megadiff.observe.evaluation import MeanEstimate
from megadiff.report import charts
from megadiff.report.charts import (
    MAX_POINTS,
    Axis,
    band_path,
    curve,
    dots_path,
    line_path,
    running_mean,
    ticks,
    value_axis,
)
from megadiff.report.page import ENVIRONMENT


def drawn(kind: str, *data, **options) -> str:
    """Return the HTML of a line_chart, stacked_chart or bar_chart."""
    macros = ENVIRONMENT.get_template("charts.html").module
    return str(getattr(macros, kind)(getattr(charts, kind)(*data, **options)))


def mean(value: float, low: float | None = None, high: float | None = None) -> MeanEstimate:
    return MeanEstimate(mean=value, low=low, high=high, n=9)


@pytest.mark.parametrize(
    "low, high", [(0, 1), (-3e-7, 5e-7), (0.123, 0.124), (1, 60), (1, 12345), (-1e9, 1e9)]
)
def test_ticks_are_round_few_and_inside(low, high):
    values = ticks(low, high)
    slack = (high - low) * 1e-6
    assert 2 <= len(values) <= 8
    assert all(low - slack <= value <= high + slack for value in values)
    steps = {f"{later - value:.3e}" for value, later in zip(values, values[1:])}
    assert len(steps) == 1 and steps.pop()[0] in "125"


def test_axes_fit_their_values():
    assert Axis(low=1, high=3).place(2) == 0.5
    log = value_axis([1e-7, 3e-3])
    assert log.is_log and (log.low, log.high) == (pytest.approx(1e-7), pytest.approx(1e-2))
    assert log.place(3e-7) == pytest.approx(0.0954, abs=1e-3)
    for values in ([], [0.0], [5.0, 5.0], [-1.0, 1.0], [0.0, 1e-9]):
        axis = value_axis(values)
        assert axis.low < axis.high and all(0 <= axis.place(value) <= 1 for value in values)
    assert value_axis([0.0, 1.0]).low == 0.0


def test_paths_break_at_missing_values_and_lone_points_are_dots():
    points = [(0.0, 0.0), (0.25, 1.0), (0.5, None), (0.75, 0.5), (1.0, None)]
    assert line_path(points) == "M0 1000L250 0M750 500"
    assert dots_path(points) == "M750 500h0"
    assert band_path([0, 0.5, 1], [0, 0, None], [1, 1, None]) == "M0 0L500 0L500 1000L0 1000Z"


def test_a_long_run_keeps_its_extremes_as_a_band():
    rows = [{"step": step, "a/x": 1000.0 if step == 777 else 1.0} for step in range(1, 3001)]
    line = curve(rows, "a/x")
    assert len(line.steps) <= MAX_POINTS and line.steps[-1] == 3000
    assert max(line.high) == 1000.0 and min(line.low) == 1.0


def test_the_band_is_one_standard_deviation_where_known():
    rows = [
        {"step": 1, "r/m": 2.0, "r/s": 0.5},
        {"step": 2, "r/m": 3.0},
        {"step": 3, "r/m": None, "r/s": 0.1},
    ]
    line = curve(rows, "r/m", std_key="r/s")
    assert (line.low, line.high) == ((1.5, None, None), (2.5, None, None))


def test_running_mean_keeps_gaps_and_constants():
    assert running_mean([1.0, None, 1.0, 4.0], window=3) == [1.0, None, 2.5, 2.5]


def test_a_chart_carries_its_values_and_escapes_its_words():
    rows = [{"step": 1, "a/x": 0.5}, {"step": 4, "a/x": None}, {"step": 7, "a/x": 2.0}]
    html = drawn("line_chart", curve(rows, "a/x"), title='<b>"&', key="a/x")
    data = json.loads(unescape(re.search(r'data-chart="([^"]*)"', html)[1]))
    assert data == {"steps": [1, 4, 7], "ends": [1, 7], "series": [['<b>"&', "0.5|–|2"]]}
    assert "<b>" not in html and "1 not finite" in html


def test_bars_stack_to_the_total_at_their_steps():
    html = drawn(
        "stacked_chart",
        [10, 20, 40],
        {"a": [1, 2, 3], "b": [1, 0, 1]},
        title="t",
        key="k",
        unit="s",
    )
    boxes = [
        tuple(map(float, box))
        for box in re.findall(
            r'<rect class="part\d" x="(.*?)" y="(.*?)" width="(.*?)" height="(.*?)"/>', html
        )
    ]
    assert len(boxes) == 6
    first_a, _, third_a, first_b, _, third_b = boxes
    assert first_b[1] + first_b[3] == pytest.approx(first_a[1], abs=0.2)
    assert first_a[3] / third_a[3] == pytest.approx(1 / 3, abs=0.01)
    assert third_b[1] == pytest.approx(1000 - 1000 / 1.05, abs=0.2)
    assert first_a[0] + first_a[2] / 2 == pytest.approx(125) and third_a[0] + third_a[
        2
    ] / 2 == pytest.approx(875)


def rects(html: str) -> list[tuple[int, float, float]]:
    """(series' colour, left, width) of every bar, in thousandths of the axis."""
    found = re.findall(r'<rect class="part(\d)" x="(.*?)" y=".*?" width="(.*?)"', html)
    return [(int(part), float(left), float(width)) for part, left, width in found]


def test_lying_bars_are_as_long_as_their_values_and_carry_their_intervals():
    rows = {"<one>": [mean(0.5, 0.4, 0.65), mean(0.25)], "two": [None, mean(1.0)]}
    html = drawn(
        "bar_chart", rows, series=["before", "now"], title="t", key="k", is_share=True, text=str
    )
    assert rects(html) == [(4, 0, 500), (0, 0, 250), (0, 0, 1000)]
    assert re.findall(r'class="whisker" d="M(.*?) .*?H(.*?)"', html) == [("400.0", "650.0")]
    assert re.findall(r"<b>(.*?)</b>", html) == ["0.5", "0.25", "–", "1.0"]
    assert "&lt;one&gt;" in html and "<one>" not in html
    assert html.index("before") < html.index("now")


def test_a_bar_below_zero_goes_left_from_zero():
    rows = {"a": [mean(-2.0)], "b": [mean(2.0)]}
    html = drawn("bar_chart", rows, series=["s"], title="t", key="k")
    (_, left, width), (_, zero, other) = rects(html)
    assert left + width == pytest.approx(zero, abs=0.2) and zero == pytest.approx(500, abs=0.2)
    assert width == pytest.approx(other, abs=0.2)
    html = drawn("bar_chart", {"a": [mean(0.0)]}, series=["s"], title="t", key="k")
    assert rects(html) == [(0, 0, 0)]


def test_more_series_than_can_be_told_apart_are_refused():
    with pytest.raises(ValueError, match="6 series in one bar chart, at most 5"):
        charts.bar_chart({}, series=list("abcdef"), title="t", key="k")


@pytest.mark.parametrize(
    ("low", "high", "texts"),
    [
        (0.0, 1.0, ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        (1.157, 1.163, ["1.158", "1.16", "1.162"]),
        (-1e-8 - 3e-12, -1e-8 + 3e-12, ["−1.0002e−08", "−1e−08", "−9.998e−09"]),
    ],
)
def test_the_ticks_of_an_axis_can_be_told_apart(low, high, texts):
    assert [text for _, text in charts.Axis(low=low, high=high).tick_texts()] == texts
