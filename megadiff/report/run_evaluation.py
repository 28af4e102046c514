"""The report's section on held-out prompts: what they score before and after training, and what they look like."""

from __future__ import annotations

from pathlib import Path

from megadiff.observe.evaluation import Comparison, Estimate, Evaluation
from megadiff.report.evaluation_parts import leading_reward, task_chart, wall
from megadiff.report.evaluation_table import gain_text, interval_text, value_text
from megadiff.report.page import section, tile

TITLE = "Held-out evaluation"
MAX_REWARDS = 4  # with bars of their own
Evaluations = list[
    tuple[Path, Evaluation]
]  # of a run's first and last evaluated step, with their folders


def accuracy_headline(heldout: Comparison | None) -> str | None:
    """What the first 0/1 reward did in one sentence; None without one. "Rose" and "fell" only where the interval of the
    paired difference leaves out 0."""
    if heldout is None:
        return None
    name = leading_reward(heldout.evaluation)
    if name not in heldout.reward_names or not _is_share(heldout, name):
        return None
    before, now = (value_text(each.estimate(name).mean, is_share=True) for each in _both(heldout))
    gain = heldout.difference(name)
    if not _is_clear(gain):
        return f"Held-out accuracy went from {before} to {now}: within the noise."
    return f"Held-out accuracy {'rose' if gain.mean > 0 else 'fell'} from {before} to {now}."


def heldout_tile(evaluations: Evaluations, heldout: Comparison | None) -> list[str]:
    """The last evaluation's leading reward, with its change; [] without an evaluation."""
    if not evaluations:
        return []
    last = evaluations[-1][1]
    name = leading_reward(last)
    is_share, found = last.is_share(name), last.estimate(name)
    detail = f"95 %: {interval_text(found, is_share=is_share)}"
    if heldout is not None and name in heldout.reward_names:
        gain = heldout.difference(name)
        interval = interval_text(gain, is_share=is_share, is_gain=True)
        detail = f"{gain_text(gain.mean, is_share=is_share)}{' points' if is_share else ''}, 95 %: {interval}"
    label = "Held-out accuracy" if is_share else f"Held-out {name}"
    return [tile(label, _pretty(value_text(found.mean, is_share=is_share)), _pretty(detail))]


def heldout_section(evaluations: Evaluations, heldout: Comparison | None, *, charts: str) -> str:
    """Bars of every task, the curves over steps, and the same samples before and after; "" without any of them.

    charts: HTML of the eval/* curves. Where the two ends cannot be compared, only the last is shown.
    """
    if not evaluations:
        return section(TITLE, f'<div class="charts">{charts}</div>', lead=LEAD) if charts else ""
    pairs = evaluations if heldout is not None else evaluations[-1:]
    folders, shown = zip(*pairs)
    series = [f"step {each.step}" for each in shown]
    leading = leading_reward(shown[-1])
    names = sorted(shown[-1].reward_names, key=lambda name: name != leading)[:MAX_REWARDS]
    bars = "".join(task_chart(shown, name, series=series) for name in names)
    body = f'<div class="bar-charts">{bars}</div><div class="charts">{charts}</div>'
    if pictures := wall(shown, folders, series=series):
        words = " and ".join(series)
        body += f'<header class="sub"><h3>The same noise at {words}</h3><p>{WALL_LEAD[len(shown)]}</p></header>{pictures}'
    last = shown[-1]
    counts = f"{len(last.samples)} samples of {last.num_prompts} prompts, {last.num_inference_steps} steps each."
    return section(TITLE, body, lead=f"{LEAD} {counts}")


LEAD = "The prompts of eval.prompts, drawn from the same noise every time."
WALL_LEAD = {
    1: "Not chosen by hand: the first samples of every task.",
    2: "Left before, right after. Not chosen by hand: the first samples of every task.",
}


def _both(heldout: Comparison) -> tuple[Evaluation, Evaluation]:
    return heldout.baseline, heldout.evaluation


def _is_share(heldout: Comparison, name: str) -> bool:
    return all(each.is_share(name) for each in _both(heldout))


def _is_clear(gain: Estimate) -> bool:
    return gain.low is not None and gain.high is not None and not gain.low <= 0 <= gain.high


def _pretty(text: str) -> str:
    """With true minus signs."""
    return text.replace("-", "−")
