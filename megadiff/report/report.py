"""Write a run as one HTML page, during the run as well as after it.

What is missing (metrics, samples, config) is left out.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from megadiff.observe.evaluation import Comparison, Evaluation
from megadiff.observe.metrics import (
    LOSS,
    STAGES,
    VERDICT_STEPS,
    Row,
    Rows,
    column,
    format_seconds,
    median,
    metric_keys,
    pretty_number,
    run_seconds,
    stage_key,
    step_of,
    step_seconds,
)
from megadiff.report.answers import answers
from megadiff.report.charts import Drawing, buckets, curve, line_chart, stacked_chart
from megadiff.report.evaluation_page import (
    ALL_ALIKE,
    Weights,
    leading_reward,
    reward_sentence,
    task_chart,
    wall,
)
from megadiff.report.evaluation_strips import evaluation_strips
from megadiff.report.evaluation_table import format_of
from megadiff.report.events_section import events_parts
from megadiff.report.page import TEMPLATES, Section, Tile, change_sentence, write_page
from megadiff.report.pictures import comes_again, pick_rows, strips
from megadiff.report.rewards_section import rewards_parts
from megadiff.report.run_record import CONFIG_NAME, RunRecord, read_run
from megadiff.report.speed import charted, speed_table

logger = logging.getLogger(__name__)

REPORT_NAME = "report.html"
MAX_TIME_BARS = 80  # on a wide screen a bar is then still a few pixels wide
MAX_HELDOUT_REWARDS = 4  # with bars of their own

HELD_OUT = "Held-out evaluation"
TIME = "Where the time goes"
OVER_TIME = "Samples over time"
TEXTS = yaml.safe_load((TEMPLATES / "texts.yaml").read_text("utf-8"))
UNTIMED = "other"  # seconds of a step beyond its stages


def section_keys(keys: Sequence[str]) -> dict[str, list[str]]:
    """Return section → its metrics, named ones first."""
    section_of: dict[str, str] = {}
    for name, section in TEXTS["sections"].items():
        section_of |= dict.fromkeys(section["metrics"], name)

    sections: dict[str, list[str]] = {name: [] for name in TEXTS["sections"]}
    # texts.yaml has them in the order in which a reader wants them.
    named = [key for key in TEXTS["metrics"] if key in keys]

    for key in dict.fromkeys([*named, *sorted(keys)]):
        area, _, quantity = key.partition("/")
        if area == "reward" and "/" in quantity:
            area = "reward/<name>"
        section = section_of.get(area, "Other metrics")
        sections[section_of.get(key, section)].append(key)

    return sections


def headline(run: RunRecord) -> str:
    """Say in one sentence what the run achieved: in a trained reward held out, else in training."""
    if not run.last_step:
        return "No step is finished yet."
    ends = run.ends
    # A supervised run trains on no reward: of those it tells an accuracy alone.
    is_supervised = ends is not None and ends.key == LOSS
    held_out = held_out_headline(run.heldout, run.weights, accuracy_only=is_supervised)
    if held_out is not None:
        return held_out
    if ends is None:
        return "Neither reward nor loss has been recorded."

    name = ends.key.partition("/")[0]
    first = pretty_number(ends.first)
    if len(column(run.rows, ends.key)) == 1:
        return f"One step so far, at a {name} of {first}."

    last = pretty_number(ends.last)
    unclear = "within the noise" if ends.window == VERDICT_STEPS else "too early to say"
    return change_sentence(
        name.capitalize(),
        first,
        last,
        gain=ends.gain,
        is_clear=ends.is_clear,
        unclear=unclear,
    )


def held_out_headline(
    heldout: Comparison | None, weights: Weights = ALL_ALIKE, *, accuracy_only: bool = False
) -> str | None:
    """Say in one sentence what the leading trained reward did; None without a comparison of it.

    accuracy_only: say nothing of rewards that are more than 0 or 1.
    """
    if heldout is None:
        return None
    reward = leading_reward(heldout.evaluation, weights)
    if not weights.get(reward, 1.0) or reward not in heldout.reward_names:
        return None
    is_share = heldout.is_share(reward)
    if accuracy_only and not is_share:
        return None
    subject = "Held-out accuracy" if is_share else f"Held-out {reward}"
    return reward_sentence(heldout, reward, subject)


def _tiles(run: RunRecord) -> list[Tile]:
    """Return the numbers that a reader looks for first."""
    rows = run.rows
    ends = run.ends
    tiles = []
    if run.evaluation is not None:
        tiles.append(_heldout_tile(run, run.evaluation))

    if ends is not None and ends.key == LOSS:
        detail = f"mean of {ends.window}, from {pretty_number(ends.first)}"
        tiles.append(("Loss", pretty_number(ends.last), detail))
    elif ends is not None:
        rewards = column(rows, ends.key)
        if len(rewards) > 1:
            gain = f"{'+' if ends.gain > 0 else ''}{pretty_number(ends.gain)}"
            detail = f"first {ends.window} → last {ends.window} steps"
            if ends.noise:
                detail += f", {pretty_number(abs(ends.gain) / ends.noise)} σ of the first"
            tiles.append(("Gain", gain, detail))
        # Beside the held-out tile it would begin a second row.
        if run.evaluation is None:
            best = f"best step {pretty_number(max(rewards))}"
            tiles.append(("Reward now", pretty_number(ends.last), best))

    tiles.append(("Steps", str(run.last_step), f"of {run.num_steps}" if run.num_steps else ""))
    typical_s = median(step_seconds(row) for row in rows)
    whole_s = run_seconds(rows)
    if typical_s is not None and whole_s is not None:
        detail = f"{format_seconds(typical_s)} a step"
        evaluations = column(rows, "time/evaluate_s")
        if evaluations:
            detail += f", {format_seconds(sum(evaluations))} of evaluations"
        tiles.append(("Wall time", format_seconds(whole_s), detail))

    rate = median(column(rows, "perf/samples_per_s"))
    if rate is not None:
        tiles.append(("Samples per second", pretty_number(rate), "median"))

    gaps = column(rows, "parity/log_prob_gap_max")
    if gaps:
        tiles.append(("Parity gap", pretty_number(max(gaps)), "largest of the run"))
    return tiles


def _heldout_tile(run: RunRecord, last: Evaluation) -> Tile:
    """Return the last evaluation's leading reward, with its change where there is one."""
    heldout = run.heldout
    reward = leading_reward(last, run.weights)
    form = format_of(last, heldout, reward)
    mean = last.estimate(reward)
    detail = f"95 %: {form.interval(mean)}"

    if heldout is not None and reward in heldout.reward_names:
        gain = heldout.difference(reward)
        points = " points" if form.is_share else ""
        detail = f"{form.gain(gain.mean)}{points}, 95 %: {form.interval(gain)}"

    label = "Held-out accuracy" if form.is_share else f"Held-out {reward}"
    # True minus signs, as pretty_number writes them.
    return label, form.value(mean.mean).replace("-", "−"), detail.replace("-", "−")


def chart_words(key: str) -> dict[str, str]:
    """Return the title, key, note and kind of a metric's chart."""
    # A key without a name of its own is titled by its quantity.
    quantity = key.partition("/")[2].replace("_", " ")
    title, note = TEXTS["metrics"].get(key, (quantity[:1].upper() + quantity[1:], ""))
    kind = "hero" if key in ("reward/mean", LOSS) else ""
    return {"title": title, "key": key, "note": note, "kind": kind}


def _chart(rows: Rows, key: str) -> Drawing:
    words = chart_words(key)
    std_key = None
    if key == "reward/mean":
        std_key = "reward/std"
        words["note"] += "; band: ± one standard deviation" if column(rows, std_key) else ""

    smooth = key == LOSS or key.startswith(("reward/", "diversity/"))
    return line_chart(curve(rows, key, std_key=std_key), **words, smooth=smooth)


def _heldout_parts(run: RunRecord) -> dict[str, Any]:
    """Return bars of every task, and the same samples before and after.

    Where first and last evaluation cannot be compared, only the last is shown.
    """
    last = run.evaluation
    if last is None:
        return {}

    # Samples of other noise side by side would look like an effect of training.
    evaluations = run.evaluations if run.heldout is not None else run.evaluations[-1:]
    steps = [f"step {evaluation.step}" for _, evaluation in evaluations]

    leading = leading_reward(last, run.weights)
    # sorted() is stable: after the leading one the others keep their order.
    rewards = sorted(last.reward_names, key=lambda name: name != leading)[:MAX_HELDOUT_REWARDS]

    order = "Left before, right after. " if run.heldout is not None else ""
    lead = TEXTS["sections"][HELD_OUT]["lead"]
    counts = f"{len(last.samples)} samples of {last.num_prompts} prompts"
    return {
        "lead": f"{lead} {counts}, {last.num_inference_steps} steps each.",
        "bars": [task_chart(evaluations, reward, steps) for reward in rewards],
        "wall": wall(
            evaluations,
            steps,
            title=f"The same noise at {' and '.join(steps)}",
            lead=f"{order}Not chosen by hand: the first samples of every task.",
            weights=run.weights,
        ),
    }


def _over_time_parts(run: RunRecord) -> dict[str, Any]:
    """Return held-out samples over all evaluations; with fewer than three, those of training."""
    held_out = evaluation_strips(run.folder, run.weights)
    if held_out and run.evaluation is not None:
        reward = leading_reward(run.evaluation, run.weights)
        lead = (
            f"One row a held-out prompt, from the same noise at each evaluation, with its {reward}."
        )
        return {"lead": lead, "strips": held_out}
    lead = TEXTS["sections"][OVER_TIME]["lead"]
    if run.samples and not comes_again(pick_rows(run.samples)):
        lead = "No prompt came twice: one row a saved step, with the first sample of its prompts."
    return {"lead": lead, "strips": strips(run.samples)}


def stage_seconds(row: Row) -> dict[str, float]:
    """Return a step's seconds in each stage, 0 for a missing one, and in none of them.

    What was drawn and scored while the step before trained is none of this step's.
    """
    seconds = {stage: row.get(stage_key(stage)) or 0.0 for stage in STAGES}
    hidden = row.get("time/hidden_s") or 0.0

    for stage in ("rollout", "reward"):
        cut = min(seconds[stage], hidden)
        seconds[stage] -= cut
        hidden -= cut
    whole = step_seconds(row) or 0.0

    return {**seconds, UNTIMED: max(0.0, whole - sum(seconds.values()))}


def stage_times(rows: Rows) -> Drawing | None:
    """Return stacked bars over steps, with median seconds and share of each stage."""
    rows = [row for row in rows if step_seconds(row) is not None]
    if not rows:
        return None

    steps = [stage_seconds(row) for row in rows]
    total = sum(sum(step.values()) for step in steps) or 1.0

    groups = buckets(rows, MAX_TIME_BARS)
    stacks = {}
    stages = []

    for stage, hint in TEXTS["stages"].items():
        seconds = [step[stage] for step in steps]
        if not any(seconds):
            continue
        stacks[stage] = [fmean(bucket) for bucket in buckets(seconds, MAX_TIME_BARS)]
        percent = f"{sum(seconds) / total:.0%}"
        stages.append({"name": stage, "hint": hint, "median": median(seconds), "share": percent})

    mean_of = f", mean of {len(groups[0])} steps" if len(groups) < len(rows) else ""
    chart = stacked_chart(
        [step_of(group[0]) for group in groups],
        stacks,
        title="A step's seconds",
        key=f"seconds per step{mean_of}",
        unit="s",
    )

    # Timers within a stage, or of what is in none, such as an evaluation.
    listed = {stage_key(stage) for stage in (*STAGES, "step")}
    inner = {}

    for key in metric_keys(rows):
        typical_s = median(column(rows, key))
        if key.startswith("time/") and key not in listed and typical_s is not None:
            inner[key] = typical_s

    whole = median(step_seconds(row) for row in rows)
    return {"chart": chart, "stages": stages, "whole": whole, "inner": inner}


def _state(run: RunRecord) -> str:
    if not run.num_steps:
        return ""
    if not run.last_step:
        return "not started"
    return "finished" if run.is_finished else "stopped early or still going"


def write_report(run_folder: Path) -> Path:
    """Write report.html into a run's folder and return its path. Raises ValueError for no run."""
    run = read_run(run_folder)
    parts = {
        "Rewards": rewards_parts(run.rows, run.config, run.samples),
        HELD_OUT: _heldout_parts(run),
        OVER_TIME: _over_time_parts(run),
        TIME: {"charts": (), "time": stage_times(run.rows), "table": speed_table(run.rows)},
        "What happened": events_parts(run.events),
        "Config": {
            "config": run.config_text,
            "note": "" if run.config_text else f"This run has no {CONFIG_NAME}.",
        },
    }

    sections = []
    for name, keys in section_keys(charted(metric_keys(run.rows))).items():
        section = {
            "title": name,
            "lead": TEXTS["sections"][name]["lead"],
            "charts": [_chart(run.rows, key) for key in keys],
            # Last, as a section of its own kind may have another lead, or no charts.
            **parts.get(name, {}),
        }
        sections.append(Section(**section))

    path = write_page(
        run_folder / REPORT_NAME,
        kind="report",
        name=run.folder.name,
        state=_state(run),
        headline=headline(run),
        tiles=_tiles(run),
        answers=answers(run),
        sections=sections,
    )
    logger.info("report %s, %.1f MB", path, path.stat().st_size / 1e6)

    return path
