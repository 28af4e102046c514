"""Evaluation through real replicas: inside a run, of a run, of a model, and of one against the
other.
"""

import json

import pytest

from megadiff.cli.evaluate import main
from megadiff.observe.evaluation import evaluation_folders, read_evaluation
from tests.distributed.ranks import run_command
from tests.e2e.conftest import ENVIRONMENT, Trainer

FIGURES = {
    "eval/mean",
    "eval/color",
    "eval/colour_entropy_bit",
    "eval/latent_spread",
    "eval/saturation",
}


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """Held-out prompts of two tasks."""
    path = tmp_path_factory.mktemp("prompts") / "held_out.jsonl"
    rows = [
        {"prompt": f"a {color} {task}", "task": task}
        for task in ("wall", "sea")
        for color in ("red", "black")
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture(scope="module")
def keys(prompts, registry):
    return [
        "eval.every=2",
        f"eval.prompts={prompts}",
        "eval.num_samples=10",
        "eval.num_inference_steps=4",
        "optim.lr=1e-3",
        "rollout.mode=separate",
        f"rollout.registry={registry}",
    ]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_model, keys):
    """Three steps, evaluated before them, every second and at the end."""
    result = Trainer(tmp_path_factory.mktemp("run"), tiny_model).run(*keys)
    assert result.code == 0, result.stderr
    return result


def evaluate(*arguments, folder):
    """`megadiff evaluate … --json`: what it prints."""
    done = run_command(
        main, [*map(str, arguments), "--json"], folder=folder, environment=ENVIRONMENT
    )
    assert done.code == 0, done.stderr
    return json.loads(done.stdout)


def test_a_run_evaluates_before_its_first_step_when_due_and_at_the_end(trained):
    before, *rows = trained.rows
    assert before.keys() == {"step", "time/evaluate_s", *FIGURES} and before["step"] == 0
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [FIGURES & row.keys() for row in rows] == [set(), FIGURES, FIGURES]
    folders = evaluation_folders(trained.folder)
    assert [step for step, _ in folders] == [0, 2, 3]
    found = [read_evaluation(folder) for _, folder in folders]
    assert all(len(each.samples) == 10 and each.tasks == ["wall", "sea"] for each in found)
    assert len({tuple(sample.identity for sample in each.samples) for each in found}) == 1
    assert [row["eval/color"] for row in (before, *rows[1:])] == [
        each.estimate("color").mean for each in found
    ]
    assert found[0].estimate("color") != found[2].estimate(
        "color"
    )  # it has learnt something, or unlearnt it
    assert all(
        (folder / sample.file).is_file() for _, folder in folders for sample in found[0].samples
    )


def test_an_average_is_evaluated_and_does_not_sample(trained, tiny_model, keys, tmp_path):
    """The second evaluation is before step 3: that step's samples are of the trained weights."""
    averaged = Trainer(tmp_path, tiny_model).run(*keys, "algorithm.ema_decay=0.9")
    assert averaged.code == 0, averaged.stderr
    machine = ("time/", "perf/", "memory/", "sync/")
    for row, plain in zip(averaged.rows, trained.rows, strict=True):
        figures = {key for key in {*row, *plain} if not key.startswith(machine)}
        unlike = {key for key in figures if row[key] != plain[key]}
        assert all(key.startswith("eval/") for key in unlike), unlike
        assert ("eval/color" in unlike) == (row["step"] in (2, 3))
    # the evaluation has pushed the average, and so the step pushes again
    assert "time/sync_send_s" in averaged.rows[3] and "time/sync_send_s" not in trained.rows[3]
    printed = evaluate(averaged.folder, folder=tmp_path)
    assert printed["rewards"]["color"]["mean"] == pytest.approx(
        averaged.rows[-1]["eval/color"], abs=2e-3
    )


def test_a_continued_run_does_not_repeat_step_0(trained, tiny_model, keys):
    again = Trainer(trained.folder.parent, tiny_model).run(*keys, "train.num_steps=4")
    assert again.code == 0, again.stderr
    assert [row["step"] for row in again.rows] == [0, 1, 2, 3, 4]
    assert "eval/color" in again.rows[4]
    assert [step for step, _ in evaluation_folders(again.folder)] == [0, 2, 3, 4]


def test_the_command_finds_what_the_run_found(trained, tiny_model, tmp_path):
    """The run's last checkpoint against the model it started from: both as the run itself evaluated
    them.
    """
    printed = evaluate(trained.folder, "--baseline", tiny_model, "--out", tmp_path, folder=tmp_path)
    inside = dict(evaluation_folders(trained.folder))
    for folder, step in ((tmp_path, printed["step"]), (tmp_path / "baseline", 0)):
        ours, theirs = read_evaluation(folder), read_evaluation(inside[step])
        assert [sample.identity for sample in ours.samples] == [
            sample.identity for sample in theirs.samples
        ]
        for mine, its in zip(ours.samples, theirs.samples, strict=True):
            assert mine.rewards["color"] == pytest.approx(
                its.rewards["color"], abs=2e-3
            )  # a pixel may round otherwise
    difference = printed["comparison"]["rewards"]["color"]
    gain = (
        printed["rewards"]["color"]["mean"]
        - read_evaluation(tmp_path / "baseline").estimate("color").mean
    )
    assert difference["mean"] == pytest.approx(gain) and difference["won"] + difference["lost"] > 0
    assert set(difference["by_task"]) == {"wall", "sea"}
    page = (tmp_path / "page.html").read_text("utf-8")
    assert page.count("data:image/webp;base64,") == 20 and 'src="http' not in page
    assert printed["record"] == str(tmp_path / "evaluation.json")
