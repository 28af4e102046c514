"""`megadiff evaluate`: what is asked for wrongly ends with exit code 2 and a reason, before any
replica starts.
"""

import argparse
import json
import os
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from megadiff.cli import evaluate as command
from megadiff.cli import evaluate_subject
from megadiff.cli.evaluate import main
from megadiff.cli.evaluate_subject import resolve
from megadiff.train.run import run_folder
from megadiff.train.run_lock import lock

SIZE = ["rollout.height=64", "rollout.width=64"]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [
        {"prompt": f"a {color} wall", "task": task}
        for task in ("a", "b", "c")
        for color in ("red", "blue")
    ]
    path.write_text(
        "\n".join(json.dumps({**row, "prompt": f"{row['prompt']} {row['task']}"}) for row in rows)
    )
    return str(path)


@pytest.fixture(autouse=True)
def no_replica(monkeypatch):
    monkeypatch.setattr(command.replicas, "launch", lambda *_: pytest.fail("a replica was started"))


def refusal(capsys, *arguments):
    assert main([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1, captured.err
    return captured.err


def test_what_is_missing_is_named(capsys, tmp_path, tiny_model, prompts):
    assert "nowhere does not exist" in refusal(capsys, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    asked = ["--prompts", prompts, "--reward", "color"]
    assert "model_index.json" in refusal(capsys, tmp_path / "empty", *asked)
    assert "no prompts to sample; give --prompts FILE" in refusal(
        capsys, tiny_model, "--reward", "color"
    )
    assert "gone.jsonl: no such file" in refusal(
        capsys, tiny_model, "--prompts", "gone.jsonl", "--reward", "color"
    )
    assert "no reward to score with; give --reward" in refusal(
        capsys, tiny_model, "--prompts", prompts
    )


def test_a_run_without_a_checkpoint_is_refused(capsys, tiny_model, tmp_path, prompts):
    run = tmp_path / "run"
    run.mkdir()
    keys = (
        "train: {num_steps: 1, prompts_per_step: 1}\noptim: {lr: 1}\nrollout: {height: 64, "
        "width: 64}\nrun: {name: run}\n"
    )
    (run / "config.yaml").write_text(keys + f"model: {{path: {tiny_model}}}\n")
    text = refusal(capsys, run, "--prompts", prompts, "--reward", "color")
    assert f"{run} holds no checkpoint; evaluate the model it started from, {tiny_model}" in text
    text = refusal(
        capsys, tiny_model, "--prompts", prompts, "--reward", "color", *SIZE, "--baseline", run
    )
    assert f"{run} holds no checkpoint" in text


def test_numbers_and_names_that_cannot_be_are_refused(capsys, tiny_model, prompts):
    asked = [tiny_model, "--prompts", prompts, "--reward", "color", *SIZE]
    assert "--num-samples=0 < 1" in refusal(capsys, *asked, "--num-samples", "0")
    assert "2 samples < 3 tasks of the prompts (a, b, c)" in refusal(
        capsys, *asked, "--num-samples", "2"
    )
    assert "unknown key rollout.hieght; did you mean" in refusal(
        capsys, *asked, "rollout.hieght=64"
    )
    assert "no config file --nmu-samples" in refusal(capsys, *asked, "--nmu-samples", "3")
    assert "rollout.num_inference_steps=1 < 2" in refusal(
        capsys, *asked, "rollout.num_inference_steps=1"
    )
    assert "did you mean 'color'?" in refusal(
        capsys, tiny_model, "--prompts", prompts, "--reward", "colour", *SIZE
    )
    assert "height" in refusal(capsys, *asked, "rollout.height=63")


def test_prompts_that_a_reward_cannot_score_are_refused(capsys, tiny_model, tmp_path):
    path = tmp_path / "plain.txt"
    path.write_text("a wall\n")
    text = refusal(capsys, tiny_model, "--prompts", path, "--reward", "color", *SIZE)
    assert "reward.color: the color reward needs a colour in every prompt" in text


def test_a_baseline_of_another_size_is_refused_with_both(capsys, tiny_model, tmp_path, prompts):
    other = link(tiny_model, tmp_path / "other", {"rollout": {"height": 128, "width": 128}})
    asked = [tiny_model, "--prompts", prompts, "--reward", "color", "--baseline", other]
    text = refusal(capsys, *asked, "--out", tmp_path / "out")
    assert (
        "512x512" in text and "128x128" in text and "set rollout.height and rollout.width" in text
    )


def link(model: Path, folder: Path, config: dict) -> Path:
    """The model under another name, with an evaluate.yaml of its own."""
    folder.mkdir()
    for part in model.iterdir():
        (folder / part.name).symlink_to(part)
    (folder / "evaluate.yaml").write_text(yaml.safe_dump(config))
    return folder


def subject_of(*arguments, prompts=None, reward=(), num_samples=None, out=None, baseline=None):
    target, *overrides = map(str, arguments)
    options = argparse.Namespace(
        target=Path(target),
        prompts=prompts,
        reward=list(reward),
        num_samples=num_samples,
        out=out,
        baseline=baseline,
        force=False,
    )
    return resolve(options, overrides)


def test_a_model_may_say_how_it_is_evaluated(tiny_model, tmp_path, prompts):
    rewards = {"color": {"type": "color"}, "size": {"type": "jpeg_size", "weight": 0}}
    config = {
        "rollout": {"height": 64, "width": 64, "num_inference_steps": 6},
        "eval": {"prompts": "held_out.txt", "num_samples": 4},
        "model": {"dtype": "float32"},
        "reward": rewards,
    }
    model = link(tiny_model, tmp_path / "own", config)
    (model / "held_out.txt").write_text("a red wall\na blue wall\n")
    subject, plan = subject_of(model)
    assert (subject.config.rollout.height, subject.config.model.dtype) == (64, "float32")
    assert [(prompt.text, len(indices)) for prompt, indices in plan] == [
        ("a red wall", 2),
        ("a blue wall", 2),
    ]
    assert list(subject.config.reward) == ["color", "size"] and subject.folder == Path(
        "runs/evaluate_own"
    )
    # and the command line has the last word
    subject, plan = subject_of(
        model, "rollout.width=128", prompts=prompts, reward=["jpeg_size"], num_samples=3
    )
    assert (subject.config.rollout.width, list(subject.config.reward), len(plan)) == (
        128,
        ["jpeg_size"],
        3,
    )


def test_prompts_named_here_go_before_those_of_a_file(tiny_model, tmp_path, prompts):
    """Whichever of the two keys names them: the quickstart has eval.prompts."""
    config = tmp_path / "quickstart.yaml"
    config.write_text(yaml.safe_dump({"eval": {"prompts": "gone.txt"}}))
    (tmp_path / "mine.txt").write_text("a red wall\n")
    mine = str(tmp_path / "mine.txt")
    for arguments in (
        [f"data.prompts={mine}"],
        [f"data.prompts={prompts}", f"eval.prompts={mine}"],
    ):
        _, plan = subject_of(tiny_model, config, *SIZE, *arguments, reward=["color"])
        assert [prompt.text for prompt, _ in plan] == ["a red wall"]
    _, plan = subject_of(
        tiny_model, f"data.prompts={mine}", *SIZE, prompts=prompts, reward=["color"]
    )
    assert len(plan) == 6


def test_a_runs_config_beside_a_model_touches_nothing_of_the_run(tiny_model, tmp_path, prompts):
    """A run by that config may be training: its folder, and the folder of its weights."""
    config = tmp_path / "recipe.yaml"
    sync = {"transport": "disk", "folder": str(tmp_path / "weights")}
    config.write_text(yaml.safe_dump({"run": {"name": "trains"}, "sync": sync}))
    subject, _ = subject_of(tiny_model, config, *SIZE, prompts=prompts, reward=["color"])
    assert subject.folder == Path(f"runs/evaluate_{tiny_model.name}")
    assert subject.config.sync.folder == ""
    subject, _ = subject_of(
        tiny_model, config, "run.name=mine", *SIZE, prompts=prompts, reward=["color"]
    )
    assert subject.folder == Path("runs/mine")


def test_two_evaluations_in_one_folder_are_refused(capsys, tiny_model, tmp_path, prompts):
    asked = [tiny_model, "--prompts", prompts, "--reward", "color", *SIZE, "--out", tmp_path]
    with ExitStack() as stack:
        lock(tmp_path, stack)
        told = refusal(capsys, *asked)
        assert f"{tmp_path} is in use by another run (pid {os.getpid()} " in told
        assert "or give this one --out ANOTHER" in told


def test_an_earlier_evaluation_is_kept_unless_it_is_to_go(capsys, tiny_model, tmp_path, prompts):
    (tmp_path / "evaluation.json").write_text("{}")
    asked = [tiny_model, "--prompts", prompts, "--reward", "color", *SIZE, "--out", tmp_path]
    assert f"{tmp_path} holds an earlier evaluation; keep it with" in refusal(capsys, *asked)
    assert "no such file" in refusal(capsys, *asked, "--force", "--prompts", "gone.jsonl")

    (tmp_path / "evaluation.json").rename(tmp_path / "images")
    assert f"{tmp_path} holds images, but no evaluation.json; an" in refusal(capsys, *asked)
    (tmp_path / "images").unlink()
    (tmp_path / "baseline").mkdir()
    (tmp_path / "baseline/evaluation.json").write_text("{}")
    told = refusal(capsys, *asked, "--baseline", tiny_model)
    assert f"{tmp_path}/baseline holds an earlier evaluation" in told
    assert "configs/quickstart.yaml is a file; give" in refusal(capsys, "configs/quickstart.yaml")


def test_a_reward_of_the_config_keeps_its_arguments_and_ones_own_may_be_named(
    tiny_model, tmp_path, prompts
):
    reward = {"size": {"type": "jpeg_size", "args": {"quality": 30}}, "color": {"type": "color"}}
    reward["size"]["weight"] = 0  # only watched in training
    model = link(
        tiny_model, tmp_path / "own", {"reward": reward, "rollout": {"height": 64, "width": 64}}
    )
    own_class = "megadiff.rewards.color:ColorReward"
    subject, _ = subject_of(model, prompts=prompts, reward=["size", own_class])
    assert subject.config.reward["size"].args == {"quality": 30}
    assert list(subject.config.reward) == ["size", "ColorReward"]
    subject, _ = subject_of(model, prompts=prompts, reward=["size"])
    assert list(subject.config.reward) == ["size"]


def run_of(model: Path, folder: Path, config: dict, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a run's folder, whose checkpoint looks whole, with its config.yaml."""
    # What a checkpoint must hold is not looked at here.
    monkeypatch.setattr(evaluate_subject, "whole_looking", lambda _: True)
    folder.mkdir()
    whole = {
        "run": {"name": folder.name, "dir": str(folder.parent)},
        "model": {"path": str(model)},
        "train": {"num_steps": 1, "prompts_per_step": 1},
        "algorithm": {"group_size": 2},
        "optim": {"lr": 1},
        "rollout": {"height": 64, "width": 64},
        "reward": {"color": {"type": "color"}},
    }
    for section, values in config.items():
        whole[section] = whole.get(section, {}) | values
    (folder / "config.yaml").write_text(yaml.safe_dump(whole))
    return folder


@pytest.mark.parametrize("name", ["010", "2026_01_15", "a #b", "12:30", "null", "${x}"])
def test_a_run_is_the_one_in_its_folder(tiny_model, tmp_path, prompts, monkeypatch, name):
    run = run_of(tiny_model, tmp_path / name, {"run": {"name": "trained"}}, monkeypatch)
    subject, _ = subject_of(run, prompts=prompts)
    assert run_folder(subject.config) == run


def test_a_run_with_samples_drawn_ahead_can_be_evaluated(
    tiny_model, tmp_path, prompts, monkeypatch
):
    apart = {"mode": "separate", "registry": str(tmp_path), "height": 64, "width": 64}
    config = {"rollout": apart, "train": {"num_steps": 1, "prompts_per_step": 1, "staleness": 1}}
    run = run_of(tiny_model, tmp_path / "ahead", config, monkeypatch)
    subject, _ = subject_of(run, prompts=prompts)
    assert (subject.config.rollout.mode, subject.config.train.staleness) == ("colocated", 0)


def test_a_wrong_baseline_costs_nothing(capsys, tiny_model, tmp_path, prompts, monkeypatch):
    """Neither an earlier comparison, nor the minutes in which judges load."""
    monkeypatch.setattr(command, "_open_rewards", lambda *_: pytest.fail("judges were loaded"))
    comparison = tmp_path / "comparison.json"
    comparison.write_text("{}")
    asked = [tiny_model, "--prompts", prompts, "--reward", "color", *SIZE, "--out", tmp_path]
    text = refusal(capsys, *asked, "--force", "--baseline", tmp_path / "typo")
    assert "typo does not exist" in text and comparison.read_text() == "{}"


def test_two_rewards_of_one_name_are_refused(capsys, tiny_model, prompts):
    asked = [tiny_model, "--prompts", prompts, "--reward", "a:Score", "--reward", "b:Score", *SIZE]
    assert "rewards a:Score and b:Score are both named Score" in refusal(capsys, *asked)
