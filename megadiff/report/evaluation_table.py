"""An evaluation as text for a terminal, and how its numbers are written there and on its page."""

from __future__ import annotations

from collections.abc import Sequence

from megadiff.observe.evaluation import Comparison, Estimate, Evaluation
from megadiff.observe.metrics import format_number

ALL = "all"  # the row over all tasks
DIVERSITY = {  # figure → what it is
    "colour_entropy_bit": "colour entropy, bit",
    "latent_spread": "latent spread",
    "saturation": "saturation",
}


def value_text(value: float | None, *, is_share: bool) -> str:
    """49.2 % for a share, else three digits."""
    return f"{100 * value:.1f} %" if is_share and value is not None else format_number(value)


def interval_text(estimate: Estimate, *, is_share: bool, is_gain: bool = False) -> str:
    """46.6 … 51.8 in the unit of value_text, or of gain_text; "n/a" where there is none."""
    if estimate.low is None or estimate.high is None:
        return "n/a"
    write = gain_text if is_gain else value_text
    texts = [write(end, is_share=is_share) for end in (estimate.low, estimate.high)]
    return f"{texts[0].removesuffix(' %')} to {texts[1]}"


def gain_text(gain: float, *, is_share: bool) -> str:
    """With its sign; a share's in percentage points."""
    return f"{100 * gain:+.1f}" if is_share else f"{'+' if gain > 0 else ''}{format_number(gain)}"


def to_text(evaluation: Evaluation, comparison: Comparison | None = None) -> str:
    """Per reward a table of all samples and every task, then diversity; with the baseline's figures where there is one."""
    blocks = [f"{evaluation.model}: {settings_text(evaluation)}"]
    if comparison:
        baseline = f"{comparison.baseline.model}: {settings_text(comparison.baseline)}"
        blocks[0] += f"\nbaseline {baseline}; differences are on the same noise"
    for reward in evaluation.reward_names:
        rows = _compared_rows(comparison, reward) if comparison else _rows(evaluation, reward)
        blocks.append(_align(rows))
    blocks.append(_align(diversity_rows(evaluation, comparison)))
    return "\n\n".join(blocks) + "\n"


def settings_text(evaluation: Evaluation) -> str:
    """Which weights drew which samples, and how, in one line."""
    step = f"step {evaluation.step}, " if evaluation.step else ""
    frames = f"x{evaluation.num_frames}" if evaluation.num_frames > 1 else ""
    return (
        f"{step}{len(evaluation.samples)} samples of {evaluation.num_prompts} prompts, {evaluation.width}x"
        f"{evaluation.height}{frames}, {evaluation.num_inference_steps} steps{_guidance(evaluation)}, seed {evaluation.seed}"
    )


def _guidance(evaluation: Evaluation) -> str:
    """The guidance scales, of a model with two components both; "" where none is on."""
    scale, second = evaluation.guidance_scale, evaluation.guidance_scale_2
    if evaluation.true_cfg_scale > 1:
        return f", CFG {evaluation.true_cfg_scale:g}"
    if max(scale, second) <= 1:
        return ""
    return f", CFG {scale:g}" + (f" and {second:g}" if second and second != scale else "")


def groups(evaluation: Evaluation) -> list[tuple[str, str | None]]:
    """(name, task) of every row: all samples, then each task."""
    return [(ALL, None), *((task, task) for task in evaluation.tasks)]


def _rows(evaluation: Evaluation, reward: str) -> list[list[str]]:
    is_share = evaluation.is_share(reward)
    rows = [[reward, "mean", "95 % interval", "samples"]]
    for name, task in groups(evaluation):
        found = evaluation.estimate(reward, task)
        interval = interval_text(found, is_share=is_share)
        rows.append([name, value_text(found.mean, is_share=is_share), interval, str(found.n)])
    return rows


def _compared_rows(comparison: Comparison, reward: str) -> list[list[str]]:
    is_share = comparison.evaluation.is_share(reward)
    change = "points" if is_share else "change"
    rows = [[reward, "baseline", "now", change, "95 % interval", "won", "lost", "tied", "samples"]]
    for name, task in groups(comparison.evaluation):
        means = [
            each.estimate(reward, task).mean
            for each in (comparison.baseline, comparison.evaluation)
        ]
        found = comparison.difference(reward, task)
        rows.append(
            [
                name,
                *(value_text(mean, is_share=is_share) for mean in means),
                gain_text(found.mean, is_share=is_share),
                interval_text(found, is_share=is_share, is_gain=True),
                *(
                    value_text(share, is_share=True)
                    for share in (found.won, found.lost, found.tied)
                ),
                str(found.n),
            ]
        )
    return rows


def diversity_rows(evaluation: Evaluation, comparison: Comparison | None = None) -> list[list[str]]:
    """A heading, then the figures of diversity, the baseline's first."""
    shown = [comparison.baseline, evaluation] if comparison else [evaluation]
    rows = [["diversity", *(["baseline", "now"] if comparison else ["mean"])]]
    for name, label in DIVERSITY.items():
        rows.append([label, *(format_number(each.diversity.get(name)) for each in shown)])
    return rows


def _align(rows: Sequence[Sequence[str]]) -> str:
    """Columns to the right, the first to the left."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = [
        "  ".join(
            [
                row[0].ljust(max(widths[0], 20)),
                *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:])),
            ]
        )
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)
