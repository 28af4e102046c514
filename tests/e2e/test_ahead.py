"""Samples drawn one step ahead, by two replicas: repeated, resumed, on two ranks, and stopped."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path

import pytest

from megadiff.train import loop
from tests.e2e.asking import ask_in, by_file
from tests.e2e.conftest import Result, Trainer, train_in_ranks
from tests.e2e.test_invariance import SAME, assert_close
from tests.e2e.test_rescue import rows_of, saved_steps
from tests.e2e.test_stop import EX_TEMPFAIL
from tests.extra import cases

NUM_STEPS = 5
SAME_HERE = [key for key in SAME if key != "policy/kl_ref"]  # no reference here
BATCH = "batch_00000.safetensors"


@pytest.fixture(scope="module")
def keys(registry, tmp_path_factory) -> list[str]:
    prompts = tmp_path_factory.mktemp("held_out") / "held_out.txt"
    prompts.write_text("a green wall\na black wall\n")
    return [
        "rollout.mode=separate",
        f"rollout.registry={registry}",
        "rollout.num_replicas=2",
        "train.staleness=1",
        f"train.num_steps={NUM_STEPS}",
        "algorithm.old_log_prob=recompute",
        "optim.lr=1e-3",
        "checkpoint.every=1",
        "checkpoint.keep=9",
        "eval.every=2",
        f"eval.prompts={prompts}",
        "eval.num_samples=4",
    ]


@pytest.fixture(scope="module")
def whole(keys, tmp_path_factory, tiny_model) -> Result:
    """A run that nothing interrupts."""
    result = Trainer(tmp_path_factory.mktemp("whole"), tiny_model).run(*keys)
    assert result.code == 0, result.stderr
    return result


def resumed(trainer: Trainer, whole: Result, step: int, *keys: str) -> Result:
    """Go on from a step's checkpoint of the whole run, in a folder with its metrics until then."""
    folder = trainer.folder / "run"
    folder.mkdir(exist_ok=True)
    lines = (whole.folder / "metrics.jsonl").read_text().splitlines()
    before = [line for line in lines if json.loads(line)["step"] <= step]
    (folder / "metrics.jsonl").write_text("\n".join(before) + "\n")
    return trainer.run(*keys, f"checkpoint.resume={checkpoint(whole, step)}")


def checkpoint(result: Result, step: int) -> Path:
    return result.folder / "checkpoints" / f"step_{step:06d}"


def test_every_step_but_the_first_has_samples_one_step_old(whole):
    rows = {row["step"]: row for row in rows_of(whole.folder)}
    assert list(rows) == list(range(NUM_STEPS + 1))  # 0: the evaluation before
    assert [rows[step]["rollout/staleness"] for step in range(1, 6)] == [0, 1, 1, 1, 1]
    # the ratio begins at the trainer's own policy, and weights of a step before are near it
    assert all(abs(rows[step]["policy/importance_mean"] - 1) < 0.1 for step in range(1, 6))
    # the last checkpoint has no next step, all others have its samples
    has_batch = [(checkpoint(whole, step) / BATCH).is_file() for step in range(1, 6)]
    assert has_batch == [True, True, True, True, False]


def test_a_run_is_a_function_of_its_config(trainer, keys, whole):
    """Twice the same bits, also without the checkpoints and evaluations that settle a draw."""
    again = trainer.run(*keys, "checkpoint.every=0", "eval.every=0")
    assert again.code == 0, again.stderr
    evaluated = ("eval/",)
    expected = [
        {key: value for key, value in row.items() if not key.startswith(evaluated)}
        for row in rows_of(whole.folder)
        if row["step"]
    ]
    assert rows_of(again.folder) == expected


@pytest.mark.parametrize("step", [1, 2, 4])
def test_a_resumed_run_repeats_every_bit(trainer, keys, whole, step):
    result = resumed(trainer, whole, step, *keys)
    assert result.code == 0, result.stderr
    assert "are drawn with its own weights" not in result.stderr
    assert rows_of(result.folder) == rows_of(whole.folder)


def test_two_ranks_go_on_from_one_ranks_samples(tmp_path, tiny_model, keys, whole):
    """And one rank from those of two, which are in two files."""
    trainer = Trainer(tmp_path, tiny_model)
    two = [*keys, "parallel.dp=2"]
    resume = f"checkpoint.resume={checkpoint(whole, 2)}"
    result = train_in_ranks(trainer, "two", 2, *two, resume, "eval.every=0")
    assert_close(result.rows, [row for row in whole.rows if row["step"] > 2], keys=SAME_HERE)
    assert [row["rollout/staleness"] for row in result.rows] == [1, 1, 1]

    saved = checkpoint(result, 3)
    assert len(list(saved.glob("batch_*"))) == 2
    one = trainer.run(*keys, f"checkpoint.resume={saved}", "eval.every=0", name="one")
    assert one.code == 0, one.stderr
    assert_close(one.rows, [row for row in whole.rows if row["step"] > 3], keys=SAME_HERE)
    assert [row["rollout/staleness"] for row in one.rows] == [1, 1]


@pytest.mark.parametrize("stage", cases(("rollout", "train"), extra_ones=("train",)))
def test_a_stop_keeps_the_samples_in_flight(trainer, keys, whole, stage):
    """Asked while step 2's samples are drawn, or in an update."""
    keys = [*keys, "checkpoint.every=0"]
    ask = partial(ask_in, stage, partial(by_file, trainer.folder / "run"), at_call=2)
    first = trainer.run(*keys, prepare=ask)
    assert first.code == EX_TEMPFAIL, first.stderr
    (folder,) = (first.folder / "checkpoints").glob("step_*")
    assert (folder / BATCH).is_file()
    second = trainer.run(*keys)
    assert second.code == 0, second.stderr
    assert rows_of(second.folder) == rows_of(whole.folder)


def fail_in_update(step: int) -> None:
    """Let the update of a step (from 1) fail."""
    stock = loop.update

    def update(*arguments, progress, **options):
        if progress.step == step - 1:
            raise RuntimeError("a library's own error")
        return stock(*arguments, progress=progress, **options)

    loop.update = update


def test_a_rescue_keeps_samples_that_are_there(trainer, keys, whole):
    """The update that fails had its samples: the resumed run repeats it with the same ones."""
    keys = [*keys, "checkpoint.every=0"]
    failed = trainer.run(*keys, prepare=partial(fail_in_update, 4))
    assert failed.code == 1 and saved_steps(failed.folder) == ["step_000003"]
    again = trainer.run(*keys)
    assert again.code == 0, again.stderr
    assert rows_of(again.folder) == rows_of(whole.folder)


def test_a_reward_that_fails_in_the_background_ends_the_run(trainer, keys):
    """It fails on samples of step 3, while step 2 trains; that step is finished and saved."""
    failing = "reward.judge.type=tests.e2e.failing_reward:FailingReward"
    quiet = ["checkpoint.every=0", "eval.every=0"]
    began = time.monotonic()
    failed = trainer.run(*keys, *quiet, failing)
    assert failed.code == 1
    assert time.monotonic() - began < 250
    assert "reward 'judge' on sample" in failed.stderr and "the judge is out" in failed.stderr
    assert saved_steps(failed.folder) == ["step_000002"]
    assert "the samples of step 3 were not all there" in failed.stderr

    # another reward: samples are drawn anew, and no prompt is left out
    again = trainer.run(*keys, *quiet, "reward.color.type=color")
    assert again.code == 0, again.stderr
    assert "samples of step 3 are drawn with its own weights" in again.stderr
    staleness = [row["rollout/staleness"] for row in rows_of(again.folder)]
    assert staleness == [0, 1, 0, 1, 1]
