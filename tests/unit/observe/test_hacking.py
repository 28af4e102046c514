import logging
import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import synthetic_evaluation

from megadiff.observe.evaluation import (
    Comparison,
    EvaluatedSample,
    Evaluation,
    evaluation_folder,
    write_evaluation,
)
from megadiff.observe.hacking import signs
from megadiff.observe.trackers import Trackers, build_trackers
from megadiff.report.health import findings

STEPS = 120
Figure = Callable[[float], float]  # of the share of the run that is done, 0 … 1


def constant(value: float) -> Figure:
    return lambda done: value


def to(first: float, last: float) -> Figure:
    """Falls or rises most at the start, as rewards and diversity do."""
    return lambda done: last + (first - last) * math.exp(-4 * done)


HEALTHY: dict[
    str, tuple[Figure, float]
] = {  # metric → (course, standard deviation from step to step)
    "reward/mean": (to(0.50, 0.71), 0.02),
    "reward/color": (to(0.50, 0.71), 0.02),
    "diversity/colour_entropy_bit": (to(1.31, 1.15), 0.35),
    "diversity/pixel_spread": (to(0.26, 0.22), 0.03),
    "diversity/saturation": (to(0.30, 0.33), 0.03),
    "diversity/clipped_share": (to(0.20, 0.22), 0.02),
}


def run(
    seed: int = 0,
    *,
    steps: int = STEPS,
    every: int = 40,
    evals: dict[str, Figure] | None = None,
    **changed: Figure,
):
    """Rows of a noisy run.

    changed: quantity → another course; evals: held-out score → its course, logged `every` steps.
    """
    noise = random.Random(seed)
    courses = {
        key: (changed.get(key.partition("/")[2], course), sd)
        for key, (course, sd) in HEALTHY.items()
    }
    evals = evals or {}
    rows = (
        [{"step": 0, **{f"eval/{name}": course(0.0) for name, course in evals.items()}}]
        if evals
        else []
    )
    for step in range(1, steps + 1):
        row = {
            key: max(0.0, noise.gauss(course(step / steps), sd))
            for key, (course, sd) in courses.items()
        }
        held = (
            {f"eval/{name}": course(step / steps) for name, course in evals.items()}
            if step % every == 0
            else {}
        )
        rows.append({"step": step, **row, **held})
    return rows


def log(trackers: Trackers, row: dict) -> None:
    trackers.log(row["step"], {key: value for key, value in row.items() if key != "step"})


def kinds(rows, heldout=None) -> list[str]:
    return [sign.kind for sign in signs(rows, {}, heldout)]


def test_a_healthy_noisy_run_is_left_alone_at_every_step():
    for seed in range(5):
        rows = run(seed, evals={"shapes_strict": to(0.5, 0.64), "color": to(0.52, 0.66)})
        assert not [found for step in range(1, len(rows)) if (found := kinds(rows[:step]))], seed


@pytest.mark.parametrize(
    "change, kind",
    [
        ({"colour_entropy_bit": to(1.31, 0.1)}, "colours collapse"),
        ({"colour_entropy_bit": to(1.31, 0.55)}, "colours narrow"),
        ({"pixel_spread": to(0.26, 0.05)}, "spread collapse"),
        ({"pixel_spread": to(0.26, 0.12)}, "spread narrow"),
        ({"saturation": to(0.3, 0.6)}, "saturation"),
        ({"clipped_share": to(0.2, 0.5)}, "clipping"),
        ({"evals": {"shapes_strict": to(0.5, 0.4)}}, "shapes_strict falls"),
        ({"evals": {"shapes_strict": to(0.5, 0.4), "color": to(0.5, 0.7)}}, "shapes_strict falls"),
    ],
)
def test_what_goes_wrong_beside_a_rising_reward_is_named(change, kind):
    assert kinds(run(**change)) == [kind]
    still = run(mean=constant(0.5), color=constant(0.5), **change)
    assert kinds(still) == []  # nothing is gained by it
    assert kinds(run(mean=to(0.7, 0.5), **change)) == []


def test_a_mild_narrowing_gets_a_mild_word_and_a_collapse_a_grave_one():
    (mild,) = signs(run(colour_entropy_bit=to(1.31, 0.55)), {})
    (grave,) = signs(
        run(colour_entropy_bit=lambda done: 1.31 if done < 0.3 else 0.1),
        {"algorithm": {"kl_coef": 0.01}},
    )
    assert "narrowed from 1.0" in mild.sentence and "Some of that is usual" in mild.sentence
    assert "exploit" not in mild.sentence and "set algorithm.kl_coef" in mild.sentence
    assert "Reward rose by 0.1" in grave.sentence and "fell from 1." in grave.sentence
    assert " bit: the policy may be exploiting the reward." in grave.sentence
    assert (
        "raise algorithm.kl_coef (now 0.01), or go back to an earlier checkpoint" in grave.sentence
    )


def test_the_gravest_comes_first_and_all_after_what_makes_numbers_worthless():
    rows = run(
        colour_entropy_bit=to(1.31, 0.55),
        saturation=to(0.3, 0.6),
        evals={"shapes_strict": to(0.5, 0.4)},
    )
    assert kinds(rows) == ["shapes_strict falls", "saturation", "colours narrow"]
    rows[-1] |= {"loss/policy": None, "reward/zero_std_ratio": 0.9}
    words = [sentence.split()[0] for sentence in findings(rows, {}, None)]
    assert words == ["NaN", "Reward", "Reward", "Reward", "90%"]


def test_prompts_that_have_no_diversity_cannot_lose_it():
    assert kinds(run(colour_entropy_bit=to(0.15, 0.0))) == []


def evaluation(step: int, rate: float, *, size: int = 400, flips: int = 0) -> Evaluation:
    """`size` samples of which a share of `rate` is right, the same ones at every step but for
    `flips` both ways.
    """
    right = [number < rate * size for number in range(size)]
    for number in range(flips):
        right[number], right[-1 - number] = False, True
    samples = [
        EvaluatedSample(
            prompt_id=f"{n:016x}",
            sample_index=0,
            caption="a circle",
            task="single",
            rewards={"shapes_strict": float(value)},
        )
        for n, value in enumerate(right)
    ]
    return replace(synthetic_evaluation.evaluation(0.5, step=step), samples=samples)


@pytest.mark.parametrize(
    "rate, flips, kind",
    [
        (0.64, 0, []),
        (0.51, 5, ["shapes_strict lags"]),
        (0.51, 80, []),
        (0.45, 5, ["shapes_strict falls"]),
        (0.49, 0, ["shapes_strict lags"]),  # clear between pairs, and too little to be a fall
        (0.48, 180, []),
    ],
)
def test_held_out_scores_are_judged_by_their_own_noise(rate, flips, kind):
    """Many flips make a small change uncertain: then nothing is said, neither that it fell nor that
    it lags.
    """
    rows = run(evals={"shapes_strict": lambda done: 0.5 + (rate - 0.5) * done})
    pairs = Comparison(evaluation=evaluation(STEPS, rate, flips=flips), baseline=evaluation(0, 0.5))
    assert kinds(rows, pairs) == kind


@pytest.mark.parametrize(
    "rate, kind",
    [(0.36, []), (0.49, ["shapes_strict lags"]), (0.6, ["shapes_strict falls"])],
)
def test_a_score_of_a_weight_below_zero_is_wanted_to_fall(rate, kind):
    rows = run(evals={"shapes_strict": lambda done: 0.5 + (rate - 0.5) * done})
    for row in rows:
        if "reward/mean" in row:
            row["reward/shapes_strict"] = 1 - row["reward/mean"]
    pairs = Comparison(evaluation=evaluation(STEPS, rate), baseline=evaluation(0, 0.5))
    config = {"reward": {"shapes_strict": {"weight": -1}}}
    found = signs(rows, config, pairs)
    assert [sign.kind for sign in found] == kind
    assert all("rose from 0.5" in sign.claim for sign in found if sign.kind.endswith("falls"))


def test_a_held_out_score_is_compared_with_training_as_far_as_it_was_evaluated():
    late = lambda done: 0.5 if done < 0.5 else 0.7  # noqa: E731
    rows = run(mean=late, color=late, every=50, evals={"color": constant(0.5)})
    until = [row for row in rows if row["step"] < 100]  # evaluated at 50, before the reward rose
    assert kinds(until) == [] and kinds(rows[:101]) == ["color lags"]


def test_one_evaluation_says_nothing():
    rows = run(evals={"shapes_strict": to(0.5, 0.4)}, every=1000)
    assert kinds(rows) == []


def test_the_log_says_it_once_when_it_begins_and_once_more_after_a_resume(tmp_path, caplog):
    rows = run(colour_entropy_bit=to(1.31, 0.1))
    with caplog.at_level(logging.WARNING), build_trackers([], tmp_path, {}) as trackers:
        for row in rows[:100]:
            log(trackers, row)
    collapses = [record for record in caplog.records if "fell from" in record.getMessage()]
    assert len(collapses) == 1 and collapses[0].levelno == logging.WARNING
    begun = next(row["step"] for row in rows if "colours collapse" in kinds(rows[: row["step"]]))
    assert 20 <= begun < 80 and collapses[0].getMessage().startswith(
        f"step {begun}: Reward rose by"
    )

    caplog.clear()
    with (
        caplog.at_level(logging.WARNING),
        build_trackers([], tmp_path, {}, resume_step=100) as trackers,
    ):
        for row in rows[100:]:
            log(trackers, row)
    assert len(caplog.records) == 1 and caplog.messages[0].startswith("step 101: Reward rose by")
    start = collapses[0].getMessage().split("fell from ")[1].split()[0]
    assert f"fell from {start} to" in caplog.messages[0]  # the run's true start, not step 101


def test_the_log_reads_the_evaluations_as_they_are_written(tmp_path, caplog):
    with caplog.at_level(logging.WARNING), build_trackers([], tmp_path, {}) as trackers:
        for row in run(evals={"shapes_strict": to(0.5, 0.64)}):
            if row["step"] in (0, 120):
                rate = 0.5 if row["step"] == 0 else 0.45
                write_evaluation(
                    evaluation_folder(tmp_path, row["step"]), evaluation(row["step"], rate), {}
                )
            log(trackers, row)
    assert [message.split(":")[0] for message in caplog.messages] == ["step 120"]
    assert "shapes_strict fell from 0.5 to 0.45" in caplog.messages[0]
