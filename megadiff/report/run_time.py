"""The report's section on where the time of a step goes."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from megadiff.observe.metrics import (
    STAGES,
    Row,
    column,
    finite,
    median,
    metric_keys,
    pretty_number,
    stage_key,
    step_seconds,
)
from megadiff.report.charts import MAX_BARS, buckets, mean_or_none, stacked_chart

OTHER = "other"  # what a step takes beyond its stages
HINTS = {
    "data": "waiting for images and noise",
    "rollout": "sampling on the replicas",
    "reward": "scoring that sampling did not hide",
    "train": "forward, backward, optimizer",
    "sync": "weights to the replicas",
    OTHER: "in no stage: replicas falling asleep, the slowest rank's samples, figures of them",
}


def stage_seconds(row: Row) -> dict[str, float]:
    """Seconds of each stage of one step and of OTHER, the rest up to the whole step; a missing stage counts 0."""
    seconds = {stage: row.get(stage_key(stage)) or 0.0 for stage in STAGES}
    return {**seconds, OTHER: max(0.0, (step_seconds(row) or 0.0) - sum(seconds.values()))}


def time_section(rows: Sequence[Row]) -> str:
    """Stacked bars over steps and a table of medians and shares; "" when no step was timed."""
    timed = [row for row in rows if step_seconds(row) is not None]
    if not timed:
        return ""
    seconds = [stage_seconds(row) for row in timed]
    names = [name for name in (*STAGES, OTHER) if any(step[name] > 0 for step in seconds)]
    groups = buckets(range(len(timed)), MAX_BARS)
    starts = [int(timed[group[0]]["step"]) for group in groups]
    parts = [
        (name, [mean_or_none([seconds[n][name] for n in group]) or 0.0 for group in groups])
        for name in names
    ]
    key = (
        "seconds per step"
        if len(groups) == len(timed)
        else f"seconds per step, mean of {len(groups[0])} steps"
    )
    chart = stacked_chart(starts, parts, title="A step's seconds", key=key, unit="s")
    table = _table(timed, seconds, names)
    return (
        "<section><header><h2>Where the time goes</h2><p>Host seconds of each stage of a step.</p></header>"
        f'<div class="time">{chart}{table}</div></section>'
    )


def _table(rows: Sequence[Row], seconds: Sequence[dict[str, float]], names: Sequence[str]) -> str:
    """Median seconds and share of the run's time per stage, then the other timers."""
    total = sum(sum(step.values()) for step in seconds) or 1.0
    body = ""
    for number, name in enumerate(names):
        values = [step[name] for step in seconds]
        share = sum(values) / total
        body += (
            f'<tr><th scope="row"><i class="part{number}"></i>{name}<small>{HINTS[name]}</small></th>'
            f"<td>{pretty_number(median(values))}</td><td>{share:.0%}</td></tr>"
        )
    whole = median(step_seconds(row) for row in rows)
    body += f'<tr class="sum"><th scope="row">whole step</th><td>{pretty_number(whole)}</td><td></td></tr>'
    body += "".join(
        f'<tr class="inner"><th scope="row">{escape(key)}</th>'
        f"<td>{pretty_number(median(column(rows, key)))}</td><td></td></tr>"
        for key in inner_keys(rows)
    )
    return (
        '<div class="card"><table><thead><tr><th scope="col">Stage</th><th scope="col">median s</th>'
        f'<th scope="col">share</th></tr></thead><tbody>{body}</tbody></table></div>'
    )


def inner_keys(rows: Sequence[Row]) -> list[str]:
    """time/* metrics that are neither a stage nor the whole step: timers within one, or of what is in no stage; evaluation."""
    known = {stage_key(stage) for stage in (*STAGES, "step")}
    return [
        key
        for key in metric_keys(rows)
        if key.startswith("time/") and key not in known and finite(column(rows, key))
    ]
