"""Write an evaluation as text for a terminal; its page writes numbers the same way."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megadiff.observe.evaluation import Comparison, Difference, Evaluation, MeanEstimate
from megadiff.observe.metrics import format_number
from megadiff.process.words import counted

ALL = "all"  # the row over all tasks
MIN_NAME_WIDTH = 20  # columns, so that the tables of several rewards line up
DIVERSITY = {  # figure → its label
    "colour_entropy_bit": "colour entropy, bit",
    "latent_spread": "latent spread",
    "saturation": "saturation",
}


@dataclass(frozen=True)
class RewardFormat:
    """Write a reward's values: in percent when they are all 0 or 1, else with three digits."""

    is_share: bool

    def value(self, value: float) -> str:
        """Write 49.2 % or 0.492, n/a for NaN."""
        if math.isnan(value):
            return "n/a"
        return f"{100 * value:.1f} %" if self.is_share else format_number(value)

    def gain(self, gain: float) -> str:
        """Write a change with its sign, a share's in percentage points; n/a for NaN."""
        if math.isnan(gain):
            return "n/a"
        if self.is_share:
            return f"{100 * gain:+.1f}"
        return f"{'+' if gain > 0 else ''}{format_number(gain)}"

    def interval(self, estimate: MeanEstimate) -> str:
        """Write 46.6 to 51.8 %, a difference with signs; "n/a" without an interval."""
        if estimate.low is None or estimate.high is None:
            return "n/a"
        write = self.gain if isinstance(estimate, Difference) else self.value
        return f"{write(estimate.low).removesuffix(' %')} to {write(estimate.high)}"


SHARE = RewardFormat(is_share=True)


def reward_format(evaluations: Sequence[Evaluation], reward: str) -> RewardFormat:
    """Return the format that fits the reward in all evaluations that have it."""
    scored = [evaluation for evaluation in evaluations if reward in evaluation.reward_names]
    return RewardFormat(all(evaluation.is_share(reward) for evaluation in scored))


def format_of(evaluation: Evaluation, comparison: Comparison | None, reward: str) -> RewardFormat:
    """Return the format of an evaluation's reward, which fits a baseline's values as well."""
    return reward_format([comparison.baseline, evaluation] if comparison else [evaluation], reward)


def to_text(evaluation: Evaluation, comparison: Comparison | None = None) -> str:
    """Write a table per reward with a row a task, then diversity, each beside the baseline's."""
    # No characters beyond ASCII of ours: a terminal or a log may not show them.
    head = f"{evaluation.model}: {settings_text(evaluation)}"
    if comparison:
        baseline = comparison.baseline
        head += f"\nbaseline {baseline.model}: {settings_text(baseline)}"
        head += "; differences are on the same noise"

    blocks = [head]
    for reward in evaluation.reward_names:
        blocks.append(align(list(_rows(evaluation, comparison, reward))))
    blocks.append(align(diversity_rows(evaluation, comparison)))
    return "\n\n".join(blocks) + "\n"


def settings_text(evaluation: Evaluation) -> str:
    """Describe in one line which weights drew which samples, and how."""
    step = f"step {evaluation.step}, " if evaluation.step else ""
    samples = counted(len(evaluation.samples), "sample")
    prompts = counted(evaluation.num_prompts, "prompt")
    steps = counted(evaluation.num_inference_steps, "step")
    return (
        f"{step}{samples} of {prompts}, {evaluation.size_text}, {steps}{_guidance(evaluation)}, "
        f"seed {evaluation.seed}"
    )


def _guidance(evaluation: Evaluation) -> str:
    """Describe the guidance scales, both of a model with two components; "" where none is on."""
    # A scale of 1 or less switches guidance off: there is nothing to tell.
    scale = evaluation.guidance_scale
    second = evaluation.guidance_scale_2
    if evaluation.true_cfg_scale > 1:
        return f", CFG {evaluation.true_cfg_scale:g}"
    if max(scale, second) <= 1:
        return ""
    return f", CFG {scale:g}" + (f" and {second:g}" if second and second != scale else "")


def groups(evaluation: Evaluation) -> list[tuple[str, str | None]]:
    """Return (name, task) of every row: all samples, then each task."""
    named = {task: f"{task} (task)" if task == ALL else task for task in evaluation.tasks}
    return [(ALL, None), *((name, task) for task, name in named.items())]


def _rows(
    evaluation: Evaluation, comparison: Comparison | None, reward: str
) -> Iterator[list[str]]:
    """Yield the head of a reward's table, then a row over all samples and one a task."""
    form = format_of(evaluation, comparison, reward)
    if comparison:
        yield [reward, "baseline", "now", "points" if form.is_share else "change", *DIFFERENCE_HEAD]
    else:
        yield [reward, "mean", "95 % interval", "samples"]

    for name, task in groups(evaluation):
        mean = evaluation.estimate(reward, task)
        now = form.value(mean.mean)
        if comparison:
            before = form.value(comparison.baseline.estimate(reward, task).mean)
            yield [name, before, now, *difference_cells(comparison, reward, task)]
        else:
            yield [name, now, form.interval(mean), str(mean.n)]


DIFFERENCE_HEAD = ("95 % interval", "won", "lost", "tied", "samples")


def difference_cells(comparison: Comparison, reward: str, task: str | None) -> list[str]:
    """Return the mean change, then the cells under DIFFERENCE_HEAD."""
    form = RewardFormat(comparison.is_share(reward))
    gain = comparison.difference(reward, task)
    outcomes = map(SHARE.value, (gain.won, gain.lost, gain.tied))
    return [form.gain(gain.mean), form.interval(gain), *outcomes, str(gain.n)]


def diversity_rows(evaluation: Evaluation, comparison: Comparison | None = None) -> list[list[str]]:
    """Return a heading and the figures of diversity, the baseline's first."""
    evaluations = [comparison.baseline, evaluation] if comparison else [evaluation]
    rows = [["diversity", *(["baseline", "now"] if comparison else ["mean"])]]
    for name, label in DIVERSITY.items():
        figures = [format_number(evaluation.diversity.get(name)) for evaluation in evaluations]
        rows.append([label, *figures])
    return rows


def align(rows: Sequence[Sequence[str]]) -> str:
    """Align the first column to the left, all others to the right."""
    # By column over all rows, the head included.
    name_width, *widths = (max(map(len, cells)) for cells in zip(*rows))
    lines = []
    for name, *cells in rows:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths)]
        lines.append("  ".join([name.ljust(max(name_width, MIN_NAME_WIDTH)), *padded]).rstrip())
    return "\n".join(lines)
