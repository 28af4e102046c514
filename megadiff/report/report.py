"""A run as one HTML page that needs nothing but itself: no network, no other file.

The page is written while the run goes on as well as after it; what is missing (metrics, samples, config) is left out.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import yaml

from megadiff.observe.evaluation import Comparison
from megadiff.observe.heldout import compare, read_evaluations
from megadiff.observe.metrics import (
    LOSS,
    Row,
    Verdict,
    column,
    config_number,
    finite,
    format_seconds,
    median,
    metric_keys,
    pretty_number,
    read_rows,
    step_seconds,
    verdict,
)
from megadiff.observe.samples import SavedSample, read_samples
from megadiff.observe.trackers import METRICS_NAME
from megadiff.report.charts import curve, line_chart
from megadiff.report.health import findings
from megadiff.report.page import render_page, section, tile, write_page
from megadiff.report.run_evaluation import TITLE as HELD_OUT
from megadiff.report.run_evaluation import (
    Evaluations,
    accuracy_headline,
    heldout_section,
    heldout_tile,
)
from megadiff.report.run_samples import samples_section
from megadiff.report.run_time import time_section

logger = logging.getLogger(__name__)

REPORT_NAME = "report.html"
CONFIG_NAME = "config.yaml"

# Section → the areas of its metrics, or single ones. What is named nowhere goes to "Other metrics": nothing is hidden.
SECTIONS = {
    "Reward": ("reward",),
    "Loss": (LOSS,),
    "Diversity": ("diversity", "eval/colour_entropy_bit", "eval/latent_spread", "eval/saturation"),
    HELD_OUT: ("eval",),
    "Policy health": ("policy", "loss", "optim"),
    "Trainer and replicas agree": ("parity", "rollout"),
    "Speed and memory": ("perf", "memory"),
}
OTHER_SECTION = "Other metrics"
LEADS = {
    "Reward": "What the policy is trained for, averaged over the samples of a step.",
    "Loss": "What supervised training lowers, averaged over the images of a step.",
    "Diversity": "How different the samples of one prompt are. A reward that rises while they grow alike is being exploited.",
    "Policy health": "How far each update moves the policy, and how hard it is pushed.",
    "Trainer and replicas agree": "Samples are only on policy while both compute the same log-probabilities.",
    "Speed and memory": "What the hardware gives.",
    OTHER_SECTION: "Logged, and at home in no section above.",
}
# Key → (title, how to read it in a few words).
NAMES = {
    "reward/mean": ("Reward", "mean over all samples of a step"),
    "reward/std": ("Reward spread", "standard deviation; at 0 nothing can be learned"),
    "reward/zero_std_ratio": ("Groups without signal", "share whose samples all got one reward"),
    "diversity/colour_entropy_bit": ("Colours", "bit; among the samples of one prompt"),
    "diversity/pixel_spread": ("Pixel spread", "distance between one prompt's samples, 0 … 1"),
    "diversity/saturation": ("Saturation", "mean over all pixels; a lurid policy's rises"),
    "diversity/motion": ("Motion", "mean change of a pixel from frame to frame, 0 … 1"),
    "diversity/clipped_share": ("Clipped values", "share of colour values at 0 or 255"),
    "eval/mean": ("Held-out reward", "weighted sum, as in training"),
    "eval/colour_entropy_bit": ("Held-out colours", "bit; among the samples of one prompt"),
    "eval/latent_spread": ("Latent spread", "held out; distance between one prompt's samples"),
    "eval/saturation": ("Held-out saturation", "mean over all pixels"),
    "policy/clip_fraction": ("Clipped ratios", "healthy below 0.3"),
    "policy/kl_old": ("KL to the sampling policy", "about 0 before the first update of a batch"),
    "policy/importance_mean": (
        "Importance of the rollout",
        "1 where trainer and replica compute the same policy",
    ),
    "policy/kl_ref": ("KL to the reference", "grows slowly; a cliff is reward hacking"),
    "optim/grad_norm": ("Gradient norm", "before clipping"),
    "optim/lr": ("Learning rate", "of this step"),
    LOSS: (
        "Flow-matching loss",
        "how far velocities are off; noise and sigmas differ from step to step",
    ),
    "loss/policy": ("Policy loss", "hovers around 0; its size says little"),
    "parity/log_prob_gap_max": ("Parity gap", "largest log-prob difference of trainer and replica"),
    "rollout/staleness": ("Staleness", "versions between sampling and training"),
    "perf/samples_per_s": ("Samples per second", ""),
    "perf/mfu": ("Model FLOPs utilisation", "share of the hardware's peak"),
    "memory/peak_gib": ("Peak memory", "GiB that one trainer rank allocates"),
    "memory/rollout_gib": ("GPU memory in rollout", "peak GiB of the fullest GPU, all processes"),
    "memory/sync_gib": ("GPU memory in sync", "peak GiB of the fullest GPU, all processes"),
    "memory/train_gib": ("GPU memory in training", "peak GiB of the fullest GPU, all processes"),
    "memory/parity_gib": (
        "GPU memory in the parity gate",
        "peak GiB of the fullest GPU, all processes",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run's folder holds. evaluations: its first and its last one, and heldout the one against the other.
    config_text: config.yaml as it is, "" without one; config: its mapping, {} when it cannot be read."""

    folder: Path
    rows: Sequence[Row]
    samples: Sequence[SavedSample]
    evaluations: Evaluations
    heldout: Comparison | None
    config_text: str
    config: Mapping[str, Any]

    @property
    def last_step(self) -> int:
        """Steps that are finished; an evaluation before the first one is logged as step 0."""
        return int(self.rows[-1]["step"]) if self.rows else 0

    @property
    def num_steps(self) -> int | None:
        """Steps that were asked for."""
        number = config_number(self.config, "train", "num_steps")
        return None if number is None else int(number)


def read_run(folder: Path) -> Run:
    """ValueError when the folder does not exist, or holds neither metrics nor a config."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; give a run's folder, e.g. runs/<name>")
    config_path, metrics_path = folder / CONFIG_NAME, folder / METRICS_NAME
    if not config_path.exists() and not metrics_path.exists():
        raise ValueError(
            f"{folder} is no run: it has neither {CONFIG_NAME} nor {METRICS_NAME}; give runs/<name>"
        )
    config_text = config_path.read_text("utf-8", errors="replace") if config_path.exists() else ""
    evaluations = read_evaluations(folder)
    return Run(
        folder=folder.resolve(),
        rows=read_rows(metrics_path),
        samples=read_samples(folder),
        evaluations=evaluations,
        heldout=compare(evaluations),
        config_text=config_text,
        config=_parse_config(config_text),
    )


def _parse_config(text: str) -> dict[str, Any]:
    """The config's sections; {} when the text is no yaml (shown as it is, but nothing can be read from it)."""
    try:
        config = yaml.safe_load(text)
    except yaml.YAMLError as error:
        logger.warning("%s cannot be read: %s", CONFIG_NAME, error)
        return {}
    return (
        {key: value for key, value in config.items() if isinstance(value, dict)}
        if isinstance(config, dict)
        else {}
    )


def metric_name(key: str) -> tuple[str, str]:
    """Title and note of a metric; a key without a name of its own is titled by its quantity."""
    title = key.partition("/")[2].replace("_", " ")
    return NAMES.get(key, (title[:1].upper() + title[1:], ""))


def section_keys(keys: Sequence[str]) -> dict[str, list[str]]:
    """Section → its metrics: named ones first, in NAMES's order. time/* has a section of its own and is left out."""
    order = {key: place for place, key in enumerate(NAMES)}
    sections: dict[str, list[str]] = {name: [] for name in [*SECTIONS, OTHER_SECTION]}
    homes = {home: name for name, homes in SECTIONS.items() for home in homes}
    for key in sorted(keys, key=lambda key: (order.get(key, len(order)), key)):
        area = key.partition("/")[0]
        if area != "time":
            sections[homes.get(key, homes.get(area, OTHER_SECTION))].append(key)
    return sections


def headline(run: Run, ends: Verdict | None) -> str:
    """The verdict in one sentence."""
    if not run.last_step:
        return "No step is finished yet."
    if accuracy := accuracy_headline(run.heldout):
        return accuracy
    if ends is None:
        return "Neither reward nor loss has been recorded."
    name = ends.key.partition("/")[0]
    if len(finite(column(run.rows, ends.key))) == 1:
        return f"One step so far, at a {name} of {pretty_number(ends.first)}."
    verb = ("rose" if ends.gain > 0 else "fell") if ends.is_clear else "went"
    change = (
        f"{name.capitalize()} {verb} from {pretty_number(ends.first)} to {pretty_number(ends.last)}"
    )
    return f"{change}." if ends.is_clear else f"{change}: within the noise."


def _gain_tile(ends: Verdict) -> str:
    detail = f"first {ends.window} → last {ends.window} steps"
    if ends.noise:
        detail += f", {pretty_number(abs(ends.gain) / ends.noise)} σ of the first"
    return tile("Gain", f"{'+' if ends.gain > 0 else ''}{pretty_number(ends.gain)}", detail)


def _tiles(run: Run, ends: Verdict | None) -> list[str]:
    """The numbers that one looks for first."""
    rows = run.rows
    tiles = heldout_tile(run.evaluations, run.heldout)
    if ends is not None and ends.key == LOSS:
        tiles.append(
            tile(
                "Loss",
                pretty_number(ends.last),
                f"mean of {ends.window}, from {pretty_number(ends.first)}",
            )
        )
    rewards = finite(column(rows, "reward/mean"))
    if len(rewards) > 1:
        tiles.append(_gain_tile(ends))
    if rewards and not run.evaluations:  # one row of tiles
        tiles.append(
            tile("Reward now", pretty_number(ends.last), f"best step {pretty_number(max(rewards))}")
        )
    tiles.append(tile("Steps", str(run.last_step), f"of {run.num_steps}" if run.num_steps else ""))
    seconds = finite(step_seconds(row) for row in rows)
    if seconds:
        tiles.append(
            tile(
                "Wall time",
                format_seconds(sum(seconds)),
                f"{format_seconds(median(seconds))} a step",
            )
        )
    rate = median(column(rows, "perf/samples_per_s"))
    if rate is not None:
        tiles.append(tile("Samples per second", pretty_number(rate), "median"))
    gap = max(finite(column(rows, "parity/log_prob_gap_max")), default=None)
    if gap is not None:
        tiles.append(tile("Parity gap", pretty_number(gap), "largest of the run"))
    return tiles


def _findings_block(run: Run) -> str:
    items = "".join(
        f"<li>{escape(finding)}</li>" for finding in findings(run.rows, run.config, run.heldout)
    )
    return f'<div class="findings"><h2>Worth a look</h2><ul>{items}</ul></div>' if items else ""


def _chart(rows: Sequence[Row], key: str) -> str:
    title, note = metric_name(key)
    if key == LOSS:
        return line_chart(
            curve(rows, key), title=title, key=key, note=note, kind="hero", smooth=True
        )
    if key != "reward/mean":
        return line_chart(
            curve(rows, key),
            title=title,
            key=key,
            note=note,
            smooth=key.startswith(("reward/", "diversity/")),
        )
    line = curve(rows, key, std_key="reward/std")
    note += "; band: ± one standard deviation" if finite(column(rows, "reward/std")) else ""
    return line_chart(line, title=title, key=key, note=note, kind="hero", smooth=True)


def _metric_section(name: str, run: Run, keys: Sequence[str]) -> str:
    charts = "".join(_chart(run.rows, key) for key in keys)
    if name == HELD_OUT:
        return heldout_section(run.evaluations, run.heldout, charts=charts)
    layout = "charts dense" if name == "Diversity" else "charts"
    return section(name, f'<div class="{layout}">{charts}</div>', lead=LEADS[name]) if keys else ""


def _config_section(run: Run) -> str:
    if not run.config_text:
        return section("Config", f'<p class="empty">This run has no {CONFIG_NAME}.</p>')
    lines = run.config_text.count("\n")
    return section(
        "Config",
        f"<details><summary>{CONFIG_NAME}, resolved <em>{lines} lines</em></summary>"
        f"<pre>{escape(run.config_text)}</pre></details>",
    )


def render(run: Run) -> str:
    """The page's HTML."""
    ends = verdict(run.rows) or verdict(run.rows, key=LOSS)
    by_section = section_keys(metric_keys(run.rows))
    first = ("Reward", "Loss", "Diversity", HELD_OUT)
    sections = [_metric_section(name, run, by_section[name]) for name in first]
    sections += [samples_section(run.samples), time_section(run.rows)]
    rest = [name for name in by_section if name not in first]
    sections += [_metric_section(name, run, by_section[name]) for name in rest]
    sections.append(_config_section(run))
    running = run.num_steps and run.last_step and run.last_step < run.num_steps
    state = (
        "stopped early or still going"
        if running
        else "finished"
        if run.last_step
        else "not started"
    )
    return render_page(
        kind="report",
        name=run.folder.name,
        state=state if run.num_steps else "",
        headline=headline(run, ends),
        tiles=_tiles(run, ends),
        findings=_findings_block(run),
        sections=sections,
    )


def write_report(run_folder: Path) -> Path:
    """Writes report.html into the run's folder, aside and renamed, and returns its path. ValueError: no run there."""
    page = render(read_run(run_folder))
    path = write_page(run_folder / REPORT_NAME, page)
    logger.info("report %s, %.1f MB", path, len(page) / 1e6)
    return path
