"""Name, read and summarize the metrics of a step; the report and the progress bar use them.

A metric's key is `area/quantity_unit`, e.g. `time/rollout_s`; a figure of one component of a model
ends in its name (`optim/grad_norm/transformer_2`). A row is one step: its metrics and `step`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from statistics import median as _median
from typing import Any

from megadiff.observe.text_files import parse_line, parse_lines

Row = Mapping[str, float | None]
Rows = Sequence[Row]

STAGES = ("data", "rollout", "reward", "train", "sync")  # of a step, in the order in which they run
LOSS = "loss/flow_matching"  # of supervised training, which has no reward
TOTALS = ("mean", "std", "group_std", "zero_std_ratio")  # reward/<key> of the weighted sum
# eval/<key>, means over prompts and no scores
DIVERSITY = ("colour_entropy_bit", "latent_spread", "saturation")
VERDICT_STEPS = 5  # steps averaged at each end of a run
_KEY = re.compile(r"[a-z][a-z0-9_]*/[A-Za-z0-9_.\-]+(/[A-Za-z0-9_]+)?")


def stage_key(stage: str) -> str:
    """Return the metric key of a stage's seconds: rollout → time/rollout_s."""
    return f"time/{stage}_s"


def check_keys(keys: Iterable[str]) -> None:
    """Raise ValueError for a key that is not `area/quantity_unit` or that with `/component`.

    area: lower case. quantity: letters, digits, _ . -
    """
    for key in keys:
        if not _KEY.fullmatch(key):
            raise ValueError(
                f"metric key {key!r} is not area/quantity_unit; name it like time/rollout_s or "
                "reward/mean"
            )


def merge(*parts: Mapping[str, float]) -> dict[str, float]:
    """Merge dicts. Raises ValueError for a key in two: one would silently hide the other."""
    merged: dict[str, float] = {}
    for part in parts:
        if twice := merged.keys() & part.keys():
            raise ValueError(
                f"metrics {sorted(twice)} come from two places; give one of them another name"
            )
        merged.update(part)
    return merged


def finite(values: Iterable[float | None]) -> list[float]:
    """Return the values that are numbers: no None, NaN or infinity."""
    return [value for value in values if value is not None and math.isfinite(value)]


def config_number(config: Mapping[str, Any], section: str, key: str) -> float | None:
    """Return a number of the config, also one that yaml took for text (1e-4), or None."""
    try:
        return float(config.get(section, {}).get(key))
    except (TypeError, ValueError):  # missing, or text
        return None


def reward_weights(config: Mapping[str, Any]) -> dict[str, float]:
    """Return reward → its weight, 1 where the config has none."""
    rewards = config.get("reward") or {}
    # What somebody edited may be no section.
    sections = {name: args for name, args in rewards.items() if isinstance(args, Mapping)}
    weights = {name: config_number(sections, name, "weight") for name in sections}
    return {name: 1.0 if weight is None else weight for name, weight in weights.items()}


def wanted(weights: Mapping[str, float], reward: str) -> int:
    """Return 1 for a reward that training wants to rise, -1 for one of a weight below 0."""
    return -1 if weights.get(reward, 1.0) < 0 else 1


def median(values: Iterable[float | None]) -> float | None:
    """Return the median of the finite values, None without any."""
    numbers = finite(values)
    return _median(numbers) if numbers else None


def column(rows: Rows, key: str) -> list[float]:
    """Return the finite values of one metric over the rows."""
    return finite(row.get(key) for row in rows)


def step_of(row: Row) -> int:
    """Return a row's step, which parse_row() lets no row be without."""
    step = row["step"]
    assert step is not None
    return int(step)


def metric_keys(rows: Rows) -> list[str]:
    """Return every metric of the rows, sorted, without `step`."""
    return sorted({key for row in rows for key in row} - {"step"})


def parse_row(line: str) -> dict[str, float | None] | None:
    """Parse a line of metrics.jsonl, with None for NaN and infinity; None for a torn line."""
    row = parse_line(line)
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        return None
    metrics: dict[str, float | None] = {}
    for key, value in row.items():
        if value is None or isinstance(value, (int, float)):
            metrics[key] = value if value is not None and math.isfinite(value) else None
    return metrics


def read_rows(path: Path) -> list[dict[str, float | None]]:
    """Read a metrics.jsonl by rising step; warn of torn lines. [] without a file."""
    if not path.exists():
        return []

    rows: dict[int, dict[str, float | None]] = {}
    for row in parse_lines(path, parse_row):
        rows.setdefault(step_of(row), {}).update(row)

    return [rows[step] for step in sorted(rows)]


def step_seconds(row: Row) -> float | None:
    """Return time/step_s, or without it the sum of the step's stages; None without either."""
    if row.get("time/step_s") is not None:
        return row["time/step_s"]
    stages = finite(row.get(stage_key(stage)) for stage in STAGES)
    return sum(stages) if stages else None


def run_seconds(rows: Rows) -> float | None:
    """Return the seconds of all steps and evaluations; None where no step was timed.

    Not in it are the engine's start, the gate, saved samples and checkpoints, and repeated steps.
    """
    steps = finite(step_seconds(row) for row in rows)
    # An evaluation runs between two steps, so no step's seconds have it.
    return sum(steps) + sum(column(rows, "time/evaluate_s")) if steps else None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A metric at both ends of a run: its mean over the first and the last `window` steps.

    noise: sample standard deviation over the first window, None for fewer than VERDICT_STEPS. For
    a loss over the last window, as in the first it falls fastest.
    """

    key: str
    first: float
    last: float
    window: int
    noise: float | None

    @property
    def gain(self) -> float:
        return self.last - self.first

    @property
    def is_clear(self) -> bool:
        """Return True when the gain, up or down, is beyond three standard deviations of a step."""
        return self.noise is not None and abs(self.gain) > 3 * self.noise


def verdict(rows: Rows, *, key: str = "reward/mean") -> Verdict | None:
    """Compare first and last steps, which never overlap; None without a finite value."""
    values = column(rows, key)
    if not values:
        return None
    # Half of a short run at most, so that its two ends never share a step.
    window = max(1, min(VERDICT_STEPS, len(values) // 2))
    first = values[:window]
    last = values[-window:]
    noise = None
    # Of fewer steps a standard deviation says too little: of two, pure noise is beyond three of
    # them in every fifth run.
    if window == VERDICT_STEPS:
        noises = [stdev(first), stdev(last)]
        # without any, as of a reward that is 0 at first, the other end has some
        noise = noises[key == LOSS] or max(noises)
    return Verdict(key=key, first=fmean(first), last=fmean(last), window=window, noise=noise)


def format_number(value: float | None) -> str:
    """Write three digits in ASCII, scientific outside 1e-3 … 1e5; "n/a" for no finite value."""
    if value is None or not math.isfinite(value):
        return "n/a"
    if value == 0:
        return "0"
    if not 1e-3 <= abs(value) < 1e5:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"

    # Three digits in all: as many after the point as those before it leave.
    text = f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def pretty_number(value: float | None) -> str:
    """Write a number for a page: with a true minus sign, and a dash for a missing value."""
    text = format_number(value)
    return "–" if text == "n/a" else text.replace("-", "−")


def format_seconds(seconds: float) -> str:
    """Write 0.42 s, 12.3 s, 4 min 05 s or 3 h 12 min."""
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"
    # Rounded first: 119.6 s is 2 min 00 s and not 1 min 60 s.
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
