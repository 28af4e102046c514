"""A run that is asked to stop ends after its step, and its next attempt goes on bit for bit."""

from __future__ import annotations

import json
import os
import time
from functools import partial
from pathlib import Path

import pytest

import megadiff.cli.main
from megadiff.cli.train import main
from megadiff.observe.events import read_events
from tests.distributed.ranks import run_command, run_ranks
from tests.e2e.asking import ask_in, by_file, by_signal
from tests.e2e.conftest import ENVIRONMENT, GATED
from tests.e2e.servers import replicas_of
from tests.e2e.test_rescue import rows_of, saved_steps

NUM_STEPS = 9
EX_TEMPFAIL = 75


@pytest.fixture(scope="module")
def shared(registry):
    evaluation = ["eval.every=6", "eval.prompts={folder}/held_out.txt", "eval.num_samples=4"]
    replicas = ["rollout.mode=separate", f"rollout.registry={registry}", "checkpoint.every=0"]
    return [*replicas, *evaluation, f"train.num_steps={NUM_STEPS}"]


def arguments_for(trainer, shared):
    (trainer.folder / "held_out.txt").write_text("a green wall\na black wall\n")
    return [argument.format(folder=trainer.folder) for argument in shared]


def stopped(folder):
    """What the run's `stopped` says; it is in no attempt but the last."""
    assert not (folder / "stop").exists()
    return json.loads((folder / "stopped").read_text())


def asked(stage, *, folder=None, text="", pause_s=1.5):
    ask = by_signal if folder is None else partial(by_file, folder, text)
    return partial(ask_in, stage, ask, pause_s=pause_s)


def test_a_stop_in_every_stage_loses_nothing(trainer, shared):
    """Nine attempts of one run. Each is asked in another stage, and the step in flight is kept."""
    arguments = [*arguments_for(trainer, shared), GATED]
    # What the report cannot be written over is a warning, and no failure of the run.
    (trainer.folder / "whole/report.html").mkdir(parents=True)
    whole = trainer.run(*arguments, name="whole")
    assert whole.code == 0 and "no report: IsADirectoryError" in whole.stderr, whole.stderr
    folder = trainer.folder / "run"

    def attempt(prepare, *overrides):
        return trainer.run(*arguments, *overrides, prepare=prepare)

    by_signals = {"rollout", "train", "checkpoint"}
    steps = {"gate": 1, "rollout": 2, "reward": 3, "train": 4, "sync": 5, "evaluation": 6}
    steps["checkpoint"] = 8  # asked while step 7 is saved, which is behind that step's end
    for stage, step in steps.items():
        where = None if stage in by_signals else folder
        result = attempt(
            asked(stage, folder=where), f"checkpoint.every={int(stage == 'checkpoint')}"
        )
        assert result.code == EX_TEMPFAIL, (stage, result.stderr)
        assert f"step {step} is saved; the same command continues" in result.stderr, stage
        assert saved_steps(folder)[-1] == f"step_{step:06d}", stage
        assert [row["step"] for row in result.rows] == list(range(step + 1)), stage
        assert stopped(folder)["step"] == step, stage
        # Also of a run that was stopped, where it alone decides when it ends.
        assert (folder / "report.html").exists() and "report.html, 0" in result.stderr, stage

    began = time.monotonic()
    result = attempt(asked("reward", folder=folder, text="2", pause_s=60))
    assert result.code == EX_TEMPFAIL, result.stderr
    assert time.monotonic() - began < 50
    assert "step 8 is saved" in result.stderr and stopped(folder)["step"] == 8

    # this one is of an attempt that has ended
    by_file(folder)
    os.utime(folder / "stop", (time.time() - 60, time.time() - 60))
    result = attempt(None)
    assert result.code == 0, result.stderr
    assert f"report {folder / 'report.html'}" in result.stderr
    assert not (folder / "stop").exists() and not (folder / "stopped").exists()
    assert rows_of(folder) == rows_of(whole.folder)


@pytest.mark.parametrize("how", ["file", "signal"])
def test_a_stop_while_the_run_is_built(trainer, how):
    """Its own replicas are starting. There is nothing to save, and nothing stays behind."""
    folder = trainer.folder / "run"
    where = folder if how == "file" else None
    result = trainer.run(prepare=asked("build", folder=where, text="30", pause_s=60))
    assert result.code == EX_TEMPFAIL, result.stderr
    assert "Traceback" not in result.stderr
    assert stopped(folder)["step"] == 0
    assert not saved_steps(folder)
    assert not replicas_of(folder)


def test_a_stop_while_the_command_imports(trainer):
    command = trainer.command()
    done = run_command(
        megadiff.cli.main.main,
        ["train", *command[command.index("megadiff.cli.train") + 1 :]],
        folder=trainer.folder,
        environment=ENVIRONMENT,
        prepare=partial(ask_in, "imports", by_signal, pause_s=0),
    )
    assert done.code == EX_TEMPFAIL, done.stderr
    assert "Traceback" not in done.stderr
    assert not (trainer.folder / "run").exists()


def test_a_signal_to_one_rank_stops_all_at_one_step(trainer, shared):
    """Rank 1 alone hears SIGUSR1; the ranks agree at the end of the step."""
    arguments = [*arguments_for(trainer, shared), "parallel.dp=2", "eval.every=0"]
    command = trainer.command(*arguments)
    run_ranks(_stopped_rank, 2, command[command.index("megadiff.cli.train") + 1 :])
    folder = trainer.folder / "run"
    assert stopped(folder)["step"] == 1
    assert saved_steps(folder) == ["step_000001"]
    again = trainer.run(*arguments[:-2], "eval.every=0", "train.num_steps=2")
    assert again.code == 0, again.stderr
    assert [row["step"] for row in again.rows] == [1, 2]

    # Replicas of the shared registry may join meanwhile.
    events = [event for event in read_events(folder) if event.kind.startswith("run_")]
    assert [(event.kind, event.step) for event in events] == [
        ("run_started", 0),
        ("run_stopped", 1),
        ("run_resumed", 1),
        ("run_finished", 2),
    ]
    assert "step 1 is saved; the same command continues" in events[1].text

    # A third start finds nothing left, and changes nothing.
    last = trainer.run(*arguments[:-2], "eval.every=0", "train.num_steps=2")
    assert last.code == 0 and "is finished: 2 of train.num_steps=2" in last.stderr
    assert last.rows == again.rows and "replicas healthy" not in last.stderr
    assert [event.kind for event in read_events(folder)][-1] == "run_finished"


def _stopped_rank(arguments):
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]
    if os.environ["RANK"] == "1":
        ask_in("reward", by_signal)
    assert main(arguments) == EX_TEMPFAIL
    title = Path("/proc/self/cmdline").read_text().rstrip("\0")
    assert title == f"megadiff run: rank {os.environ['RANK']}"
