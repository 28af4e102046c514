"""Show each reward by itself: its figures in a row, and what it liked best and least."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megadiff.observe.metrics import (
    TOTALS,
    Rows,
    column,
    config_number,
    finite,
    median,
    metric_keys,
    pretty_number,
    reward_weights,
    verdict,
    wanted,
)
from megadiff.observe.samples import SavedSample
from megadiff.report.charts import Drawing
from megadiff.report.pictures import evenly_spaced, load_pictures, look

COUNTS = {"dropped", "retries"}  # of events: summed over the run, and logged where there are some
# What is in a column of its own, in this order, with its words.
COLUMNS = {
    "group_std": "spread within groups",
    "share_of_advantage": "share of the advantage",
    "dropped": "failed samples",
}
MAX_STEPS = 2  # whose best and worst samples are shown: the first and the last


def rewards_parts(
    rows: Rows, config: Mapping[str, Any], samples: Sequence[SavedSample]
) -> dict[str, Any]:
    """Return the section's parts, {} for a run without rewards."""
    names = _names(rows, config)
    if not names:
        return {}
    strips = list(_extremes(names, samples, reward_weights(config)))
    return {"charts": (), "table": _table(names, rows, config), "strips": strips}


def _names(rows: Rows, config: Mapping[str, Any]) -> list[str]:
    """Return the rewards of the config and those that were logged, which may be without one."""
    names = [str(name) for name in config.get("reward", {})]
    for key in metric_keys(rows):
        area, _, rest = key.partition("/")
        name = rest.partition("/")[0]
        if area == "reward" and rest not in TOTALS:
            names.append(name)
    return list(dict.fromkeys(names))


def _table(names: Sequence[str], rows: Rows, config: Mapping[str, Any]) -> list[list[str]]:
    """Return the head and a row a reward; what was not logged is an empty cell."""
    keys = metric_keys(rows)
    logged = [key.partition("/")[2].partition("/") for key in keys if key.startswith("reward/")]
    others = sorted({quantity for _, _, quantity in logged if quantity} - COLUMNS.keys())
    head = ["reward", "mean, first → last", *COLUMNS.values(), "seconds a step", "weight"]
    table = [head + [other.replace("_", " ") for other in others]]

    for name in names:
        seconds = median(column(rows, f"time/reward_{name}_s"))
        cells = [name, _mean(rows, f"reward/{name}")]
        cells += [_figure(rows, f"reward/{name}/{key}") for key in COLUMNS]
        cells += ["" if seconds is None else pretty_number(seconds), _weight(config, name)]
        cells += [_figure(rows, f"reward/{name}/{key}") for key in others]
        table.append(cells)
    return table


def _mean(rows: Rows, key: str) -> str:
    ends = verdict(rows, key=key)
    if ends is None:
        return ""
    first = pretty_number(ends.first)
    return first if len(column(rows, key)) == 1 else f"{first} → {pretty_number(ends.last)}"


def _figure(rows: Rows, key: str) -> str:
    """Return the mean of the last steps, the sum of what is counted, "" without a value."""
    values = column(rows, key)
    if key.rpartition("/")[2] in COUNTS:
        return pretty_number(sum(values)) if values else ""
    ends = verdict(rows, key=key)
    return "" if ends is None else pretty_number(ends.last)


def _weight(config: Mapping[str, Any], name: str) -> str:
    rewards = config.get("reward", {})
    if not isinstance(rewards.get(name), dict):
        return ""
    weight = config_number(rewards, name, "weight")
    return "0, only watched" if weight == 0 else pretty_number(weight)


def _extremes(
    names: Sequence[str], samples: Sequence[SavedSample], weights: Mapping[str, float]
) -> Iterator[Drawing]:
    """Yield a strip a reward: the best and the worst saved sample of the first and last step.

    Samples without a score have no say. Where all scores are equal there is no best one.
    """
    chosen: dict[str, list[tuple[str, SavedSample]]] = {name: [] for name in names}
    steps = evenly_spaced(sorted({sample.step for sample in samples}), MAX_STEPS)
    for name in names:
        for step in steps:
            scores = {
                sample.rewards[name] or 0.0: sample
                for sample in reversed(samples)  # of equal scores the first sample stays
                if sample.step == step and finite([sample.rewards.get(name)])
            }
            if len(scores) > 1:
                worst, *_, best = sorted(scores, reverse=wanted(weights, name) < 0)
                chosen[name] += [("best", scores[best]), ("worst", scores[worst])]

    pictures = load_pictures([sample.path for pairs in chosen.values() for _, sample in pairs])
    for name, pairs in chosen.items():
        looks = []
        for word, sample in pairs:
            drawn = {"label": f"{sample.step} {word}", "reward": sample.rewards[name]}
            looks.append(look(sample, pictures) | drawn)
        if any(drawing["picture"] for drawing in looks):
            yield {"caption": f"Best and worst by {name}", "looks": looks}
