"""Answer a reader's first three questions: did it work, can it be trusted, what comes next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megadiff.observe.evaluation import MIN_CHANGED, Comparison
from megadiff.observe.hacking import MIN_STEPS, signs
from megadiff.observe.metrics import (
    LOSS,
    VERDICT_STEPS,
    Verdict,
    column,
    config_number,
    pretty_number,
    verdict,
    wanted,
)
from megadiff.process.words import counted
from megadiff.report.evaluation_page import Weights, leading_reward
from megadiff.report.evaluation_table import RewardFormat
from megadiff.report.health import sign_sentences, unsound_sentences, untrusted_sentences
from megadiff.report.run_record import RunRecord

GRAVE = 3  # a sign's gravity from which samples are looked at before anything else
EARLY_STEPS = 2 * MIN_STEPS  # below, nothing is said of an exploited reward
GOOD = "good"
UNSURE = "unsure"
BAD = "bad"


@dataclass(frozen=True, kw_only=True)
class PageAnswer:
    """An answer on the page's first screen. mark: good, unsure, bad, or "" where none is due."""

    question: str
    mark: str = ""
    sentences: Sequence[str]


def answers(run: RunRecord) -> list[PageAnswer]:
    """Return the answers to all three questions; [] before a step is finished."""
    ends = run.ends
    if not run.last_step or ends is None:
        return []
    work = _did_it_work(run, ends)
    has_reward = ends.key != LOSS
    trust = _can_it_be_trusted(run, has_reward=has_reward)
    is_good = work.mark == GOOD and trust.mark != BAD

    return [work, trust, _what_next(run, is_good=is_good, has_reward=has_reward)]


def _did_it_work(run: RunRecord, ends: Verdict) -> PageAnswer:
    question = "Did it work?"
    if run.heldout is None:
        mark, sentence = _change_in_training(ends)
        return PageAnswer(question=question, mark=mark, sentences=[sentence])

    evaluation = run.heldout.evaluation
    leading = leading_reward(evaluation, run.weights)
    if leading not in run.heldout.reward_names:
        sentence = "Held-out samples were scored by other rewards before and after."
        return PageAnswer(question=question, mark=UNSURE, sentences=[sentence])

    mark, sentence = _heldout_change(run.heldout, leading, wants=wanted(run.weights, leading))
    sentences = [sentence]

    for name in run.heldout.reward_names:
        if name in run.untrained and run.heldout.is_share(name):
            sentences.append(f"Watched, not trained on: {_amount(run.heldout, name)}.")
    return PageAnswer(question=question, mark=mark, sentences=sentences)


def _change_in_training(ends: Verdict) -> tuple[str, str]:
    """Return the mark and the sentence for what a run without evaluations shows."""
    what = "loss" if ends.key == LOSS else "reward"
    change = f"the {what} in training went from {pretty_number(ends.first)} to "
    change += pretty_number(ends.last)
    if ends.window < VERDICT_STEPS:
        num_steps = 2 * VERDICT_STEPS
        return UNSURE, f"Too early to say: {change}; it takes {num_steps} steps to tell."
    if not ends.is_clear:
        return UNSURE, f"Not that it shows: {change}, within the noise."
    is_better = (ends.gain > 0) != (ends.key == LOSS)
    return (GOOD, f"Yes: {change}.") if is_better else (BAD, f"No: {change}.")


def _heldout_change(heldout: Comparison, reward: str, *, wants: int) -> tuple[str, str]:
    """Return the mark and the sentence for what training did to held-out samples.

    wants: as wanted() says of the reward.
    """
    gain = heldout.difference(reward)
    # Those that have the reward, which a prompt may not ask for.
    samples = counted(gain.n, "held-out sample")
    sentence = f"{_amount(heldout, reward)}, on {samples} from the same noise."
    if gain.num_changed < MIN_CHANGED:
        few = f"{gain.num_changed} of them changed, and it takes {MIN_CHANGED} to tell."
        return UNSURE, f"Not that it shows: {sentence.removesuffix('.')}; {few}"
    if not gain.is_clear:
        return UNSURE, f"Not that it shows: {sentence}"
    return (GOOD, f"Yes: {sentence}") if wants * gain.mean > 0 else (BAD, f"No: {sentence}")


def _amount(heldout: Comparison, reward: str) -> str:
    """Write `+21.2 points of shapes_strict, 95 % interval +18.8 to +23.7`."""
    gain = heldout.difference(reward)
    form = RewardFormat(heldout.is_share(reward))
    unit = " points" if form.is_share else ""
    amount = f"{form.gain(gain.mean)}{unit}".replace("-", "−")
    interval = form.interval(gain).replace("-", "−")
    return f"{amount} of {reward}, 95 % interval {interval}"


def _can_it_be_trusted(run: RunRecord, *, has_reward: bool) -> PageAnswer:
    question = "Can I trust it?"
    untrusted = list(untrusted_sentences(run.rows, run.config))
    hacking = signs(run.rows, run.config, run.heldout)
    texts = sign_sentences(hacking)
    if untrusted or texts:
        is_grave = bool(untrusted) or any(sign.gravity >= GRAVE for sign in hacking)
        mark = BAD if is_grave else UNSURE
        return PageAnswer(question=question, mark=mark, sentences=[*untrusted, *texts])

    sentences = []
    gaps = column(run.rows, "parity/log_prob_gap_max")
    if gaps:
        gap = pretty_number(max(gaps))
        sentences.append(f"Trainer and replicas agree: their log-probs differ by {gap} at most.")
    if not has_reward:
        return PageAnswer(question=question, sentences=sentences or ["Nothing speaks against it."])

    mark = GOOD
    if len(run.rows) < EARLY_STEPS:
        mark = UNSURE
        sentences.append(f"Signs of an exploited reward need {EARLY_STEPS} steps.")
    else:
        sentences.append("No sign of an exploited reward: samples stay as varied as they were.")
    if run.heldout is None:
        mark = UNSURE
        sentences.append(_why_not_held_out(run))
    return PageAnswer(question=question, mark=mark, sentences=sentences)


def _why_not_held_out(run: RunRecord) -> str:
    """Say why no two evaluations are compared."""
    steps = [evaluation.step for _, evaluation in run.evaluations]
    if len(steps) > 1:
        return (
            f"The evaluations at steps {steps[0]} and {steps[-1]} drew other samples, so they are "
            "not compared: keep eval.prompts, eval.num_samples and seed over a run."
        )
    every = config_number(run.config, "eval", "every")
    if steps and every:
        return f"One evaluation of held-out prompts so far, at step {steps[0]}: it takes two."
    if every:
        return "No evaluation of held-out prompts yet."
    return "No two evaluations of held-out prompts: set eval.every and eval.prompts."


def _what_next(run: RunRecord, *, is_good: bool, has_reward: bool) -> PageAnswer:
    sentences = list(unsound_sentences(run.rows))
    if not run.is_finished:
        sentences.insert(0, "If it does not run: the same command goes on after the last step.")
    if run.heldout is not None:
        sentences += _weakest_task(run.heldout, run.weights)
    if run.is_finished and has_reward and is_good:
        late = verdict(run.rows[len(run.rows) // 2 :])
        if late is not None and late.is_clear and late.gain > 0:
            sentences.append("The reward still rises: a larger train.num_steps goes on from here.")
    if run.is_finished and is_good:
        folder = shlex.quote(str(_from_here(run.folder)))
        sentences.append(f"Take the model: megadiff convert {folder} OUT")
    if not sentences:
        sentences = ["Look at the samples below, then change one thing."]
    return PageAnswer(question="What next?", sentences=sentences)


def _from_here(folder: Path) -> Path:
    """Return a path as a command names it: relative to where this one was started, if below."""
    here = Path.cwd()
    return folder.relative_to(here) if folder.is_relative_to(here) else folder


def _weakest_task(heldout: Comparison, weights: Weights) -> Iterator[str]:
    """Yield which task has most left to learn, where the leading reward is a share."""
    evaluation = heldout.evaluation
    reward = leading_reward(evaluation, weights)
    is_accuracy = evaluation.is_share(reward) and wanted(weights, reward) > 0
    if len(evaluation.tasks) < 2 or not is_accuracy:
        return
    estimates = {task: evaluation.estimate(reward, task) for task in evaluation.tasks}
    means = {task: estimate.mean for task, estimate in estimates.items() if estimate.n}
    task = min(means, key=lambda name: means[name])
    if means[task] == 1:
        return
    accuracy = RewardFormat(is_share=True).value(means[task])
    yield f"Most is left to learn in “{task}”, {accuracy}: more prompts like it."
