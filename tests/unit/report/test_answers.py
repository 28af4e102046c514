"""The answers say how many samples a held-out change stands on, and do not say too much."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from synthetic_evaluation import evaluation

from megadiff.observe.evaluation import EvaluatedSample, evaluation_folder, write_evaluation
from megadiff.report.answers import answers
from megadiff.report.run_record import read_run


def sample(index: int, value: float | None) -> EvaluatedSample:
    return EvaluatedSample(
        prompt_id=str(index), sample_index=0, caption="a cat", task="", rewards={"color": value}
    )


def write_run(folder: Path, *, num_right: int, num_steps: int = 20) -> Path:
    """Write a run with two evaluations: of 40 samples eight have the reward, some get it right."""
    folder.mkdir()
    (folder / "config.yaml").write_text("run: {name: x}\nreward: {color: {type: color}}\n")
    lines = [f'{{"step": {step}, "reward/mean": {step}}}\n' for step in range(1, num_steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    for step in (0, num_steps) if num_right else ():
        num_now = num_right if step else 0
        values = [float(index < num_now) if index < 8 else None for index in range(40)]
        samples = [sample(index, value) for index, value in enumerate(values)]
        found = replace(evaluation(0.0, step=step), samples=samples)
        write_evaluation(evaluation_folder(folder, step), found, {})
    return folder


@pytest.mark.parametrize(
    ("num_right", "words"),
    [
        (7, "Yes: +87.5 points of color, 95 % interval +57.9 to +100.0, on 8 held-out samples"),
        (5, "Not that it shows: .* on 8 held-out samples .*; 5 of them changed, and it takes 6"),
    ],
)
def test_a_change_counts_the_samples_that_have_the_reward(
    tmp_path: Path, num_right: int, words: str
) -> None:
    (work, *_) = answers(read_run(write_run(tmp_path / "run", num_right=num_right)))
    assert re.match(words.replace("+", r"\+"), work.sentences[0])


def test_a_reward_of_a_weight_below_zero_has_worked_where_it_fell(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_right=7)
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("type: color", "type: color, weight: -1"))
    (work, *_) = answers(read_run(folder))
    assert work.mark == "bad" and work.sentences[0].startswith("No: +87.5 points of color")


def test_a_short_run_shows_nothing_yet(tmp_path: Path) -> None:
    (work, *_) = answers(read_run(write_run(tmp_path / "run", num_right=0, num_steps=8)))
    assert work.mark == "unsure" and work.sentences[0].startswith("Too early to say: the reward")
    assert "it takes 10 steps to tell" in work.sentences[0]


@pytest.mark.parametrize(
    ("every", "steps", "words"),
    [
        (0, (), "set eval.every and eval.prompts"),
        (5, (), "No evaluation of held-out prompts yet"),
        (5, (20,), "One evaluation of held-out prompts so far, at step 20: it takes two"),
        (5, (5, 20), "steps 5 and 20 drew other samples, so they are not compared"),
    ],
)
def test_without_a_comparison_it_says_why(
    tmp_path: Path, every: int, steps: tuple[int, ...], words: str
) -> None:
    folder = write_run(tmp_path / "run", num_right=0)
    (folder / "config.yaml").write_text(f"eval: {{every: {every}}}\n")
    for step in steps:
        record = replace(evaluation(0.0, step=step), samples=[sample(step, 1.0)])
        write_evaluation(evaluation_folder(folder, step), record, {})
    sentences = [text for answer in answers(read_run(folder)) for text in answer.sentences]
    assert any(words in text for text in sentences), sentences
