"""Draw curves and bars with block characters, for terminals."""

from __future__ import annotations

from megadiff.observe.metrics import finite
from megadiff.report.charts import Axis, Values, mean_or_none, value_axis

EIGHTHS = " ▁▂▃▄▅▆▇█"  # of a cell, from the bottom
LEFT_EIGHTHS = " ▏▎▍▌▋▊▉█"  # of a cell, from the left


def resampled(values: Values, width: int) -> list[float | None]:
    """Return `width` values: means of neighbours, or each several times where there are fewer."""
    if not values:
        return []

    columns = []
    for column in range(width):
        start = column * len(values) // width
        end = max(start + 1, (column + 1) * len(values) // width)
        columns.append(mean_or_none(values[start:end]))

    return columns


def plot(values: Values, *, width: int, height: int) -> tuple[list[str], Axis]:
    """Return `height` lines, the top one first, of an area under the curve, and its value axis.

    A gap is where no value is finite.
    """
    axis = value_axis(finite(values))
    filled = []

    for value in resampled(values, width):
        eighths = 0
        if value is not None:
            # At least one, so that the lowest value is not a gap.
            eighths = max(1, round(axis.place(value) * height * 8))

        filled.append(eighths)

    lines = []
    for row in reversed(range(height)):
        cells = [EIGHTHS[min(8, max(0, eighths - 8 * row))] for eighths in filled]
        lines.append("".join(cells))

    return lines, axis


def sparkline(values: Values, width: int) -> str:
    """Return a curve one cell high; of fewer values than `width`, a cell each."""
    numbers = finite(values)
    if not numbers:
        return ""

    low = min(numbers)
    span = max(numbers) - low
    cells = []

    for value in resampled(values, min(width, len(values))):
        if value is None:
            cells.append(" ")
        else:
            # A flat curve lies in the middle.
            fraction = (value - low) / span if span else 0.5
            cells.append(EIGHTHS[1 + round(7 * fraction)])

    return "".join(cells)


def bar(fraction: float, width: int) -> str:
    """Return a lying bar over a fraction of the width, 0 … 1."""
    eighths = round(min(1.0, max(0.0, fraction)) * width * 8)
    last = LEFT_EIGHTHS[eighths % 8] if eighths % 8 else ""
    return "█" * (eighths // 8) + last
