"""check() takes a config as the run would, and builds what the run then uses."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

import megadiff
from megadiff.cli.main import main
from megadiff.config.load import load_config
from megadiff.rewards.base import Reward, RewardSample
from megadiff.train.check import check

HERE = "test_check"


class Counted(Reward):
    """Remembers what is called."""

    calls: list[str] = []

    def __init__(self) -> None:
        self.calls.append("constructor")

    def validate(self, prompts: object) -> None:
        self.calls.append("validate")

    def score(self, samples: Sequence[RewardSample]) -> list[float]:
        return [0.0] * len(samples)

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def arguments(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setitem(sys.modules, HERE, sys.modules[__name__])
    Counted.calls.clear()
    (tmp_path / "prompts.txt").write_text("a red cup\na blue cup\n")
    (tmp_path / "config.yaml").write_text(
        f"""
run: {{name: test, dir: {tmp_path}, device: cpu}}
model: {{path: {tiny_model}, dtype: float32}}
engine: {{dtype: float32}}
data: {{prompts: {tmp_path}/prompts.txt}}
train: {{num_steps: 1, prompts_per_step: 2}}
algorithm: {{group_size: 2}}
rollout: {{height: 64, width: 64}}
optim: {{lr: 1e-4}}
reward: {{counted: {{type: "{HERE}:Counted"}}}}
"""
    )
    return [str(tmp_path / "config.yaml")]


def test_rewards_that_are_all_only_watched_train_nothing(arguments: list[str]) -> None:
    with ExitStack() as stack:
        with pytest.raises(ValueError, match="1 rewards have weight 0, need at least 1 with ano"):
            check(load_config([*arguments, "reward.counted.weight=0"]), world_size=1, stack=stack)


def test_rewards_are_constructed_once_and_handed_over(arguments: list[str]) -> None:
    with ExitStack() as stack:
        *_, scorer = check(load_config(arguments), world_size=1, stack=stack)
        assert scorer is not None
        assert isinstance(scorer.rewards["counted"], Counted)
        assert Counted.calls == ["constructor", "validate"]
    assert Counted.calls == ["constructor", "validate", "close"]


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        (
            ["algorithm.beta=0.5", "algorithm.kl_limit=1e-4"],
            [
                "algorithm.name=flow_grpo has no use for algorithm.kl_limit=0.0001, "
                "algorithm.beta=0.5"
            ],
        ),
        ([], []),
    ],
)
def test_constants_that_the_loss_does_not_take_are_told_in_one_line(
    arguments: list[str], caplog: pytest.LogCaptureFixture, overrides: list[str], lines: list[str]
) -> None:
    caplog.set_level(logging.INFO, logger="megadiff.train.check")
    with ExitStack() as stack:
        check(load_config([*arguments, *overrides]), world_size=1, stack=stack)
    assert [text for text in caplog.messages if "no use for" in text] == lines


def test_rewards_that_share_one_std_are_warned_of(
    arguments: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = '{"prompt": "a red cup", "tag": "a"}\n{"prompt": "a blue cup", "tag": "b"}\n'
    (tmp_path / "rows.jsonl").write_text(rows)
    routed = [
        f"data.prompts={tmp_path}/rows.jsonl",
        "reward.counted.only={tag: a}",
        f"reward.other={{type: '{HERE}:Counted', only: {{tag: b}}}}",
    ]
    with ExitStack() as stack:
        check(load_config([*arguments, *routed]), world_size=1, stack=stack)
    assert [text for text in caplog.messages if "trains less" in text]


@pytest.mark.parametrize(
    ("wanted", "words"),
    [(2, ""), (4, "or set train.prompts_per_step=2 and")],
)
def test_a_step_of_more_prompts_than_there_are_is_warned_of(
    arguments: list[str], caplog: pytest.LogCaptureFixture, wanted: int, words: str
) -> None:
    with ExitStack() as stack:
        config = load_config([*arguments, f"train.prompts_per_step={wanted}"])
        check(config, world_size=1, stack=stack)
    warned = [text for text in caplog.messages if "more than once" in text]
    assert len(warned) == bool(words)
    assert not words or (words in warned[0] and f"{wanted} > 2 prompts" in warned[0])


def test_a_dry_run_closes_them(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *arguments, "--dry-run"]) == 0
    assert Counted.calls == ["constructor", "validate", "close"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--world-size", "4"], "--world-size is for --dry-run"),
        (["--json"], "--json is for --dry-run"),
        (["--dry-run", "--gpus-per-node", "-3"], "--gpus-per-node -3 < 1"),
    ],
)
def test_options_of_a_dry_run_are_not_ignored(
    arguments: list[str], capsys: pytest.CaptureFixture[str], options: list[str], told: str
) -> None:
    assert main(["train", *arguments, *options]) == 2
    assert told in capsys.readouterr().err


def test_the_console_script_finds_a_reward_in_the_current_folder(
    arguments: list[str], tmp_path: Path
) -> None:
    source = "from megadiff.rewards.base import Reward\nclass Mine(Reward):\n    score = len\n"
    (tmp_path / "my_reward_beside_me.py").write_text(source)
    # -P is as a console script has it: the current folder is not on the path.
    program = "from megadiff.cli.main import entry; entry()"
    command = [sys.executable, "-P", "-c", program, "train", *arguments, "--dry-run"]
    reward_type = "reward.counted.type=my_reward_beside_me:Mine"
    done = subprocess.run(
        [*command, reward_type],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(megadiff.__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("track=[tensorbord]", "track has unknown tensorbord; the trackers are jsonl, tensorboard"),
        ("checkpoint.resume=gone", "checkpoint.resume=gone is no folder"),
        ("checkpoint.resume=''", "checkpoint.resume= is no folder"),
        (
            "parallel.tp=3 engine.backend=megatron",
            r"parallel.sp\*parallel.tp = 1\*3 = 3 does not divide the model's 4 attention heads",
        ),
        ("parallel.sp=8", r"8\*1 = 8 does not divide the model's 4 attention heads"),
        ("parallel.tp=2", "parallel.tp=2 with engine.backend=veomni, .* set parallel.tp=1"),
        (
            "engine.backend=megatron parallel.dp_replicate=2 parallel.dp=2",
            "parallel.dp_replicate=2 .* set parallel.dp_replicate=1",
        ),
        (
            "lora.rank=4 lora.start=my_lora algorithm.kl_coef=0.1",
            "lora.start=my_lora with algorithm.name=flow_grpo and algorithm.kl_coef=0.1: .*"
            "set algorithm.kl_coef=0, or merge them by `megadiff convert my_lora MODEL",
        ),
        ("lora.rank=4 lora.start=gone", "lora.start=gone does not exist"),
        ("lora.rank=4 lora.targets=[norm]", "lora.targets: 'norm' is the end of none of the"),
        ("model.path=gone", "model.path=gone: model folder gone does not exist"),
    ],
)
def test_what_only_the_run_refused(arguments: list[str], override: str, words: str) -> None:
    config = load_config([*arguments, *override.split()])
    axes = config.parallel
    world_size = max(axes.dp, 1) * axes.sp * axes.tp
    with pytest.raises(ValueError, match=words), ExitStack() as stack:
        check(config, world_size=world_size, stack=stack)


def test_a_run_in_place_of_its_checkpoint_is_told_which_it_has(
    arguments: list[str], tmp_path: Path
) -> None:
    checkpoints = tmp_path / "runs" / "a" / "checkpoints"
    newest = checkpoints / "step_000020"
    for folder in (checkpoints / "step_000010", newest):
        folder.mkdir(parents=True)
    for folder, advice in (
        (tmp_path / "runs" / "a", f"give {newest}, the newest in it"),
        (checkpoints, f"give {newest}, the newest in it"),
        (newest, r"holds no progress.json; give a checkpoint's folder"),
    ):
        config = load_config([*arguments, f"checkpoint.resume={folder}"])
        words = f"resume={folder} is no checkpoint, .*{advice}"
        with pytest.raises(ValueError, match=words), ExitStack() as stack:
            check(config, world_size=1, stack=stack)

    (newest / "progress.json").write_text("{}")  # its content is read with the weights
    config = load_config([*arguments, f"checkpoint.resume={newest}"])
    with ExitStack() as stack:
        check(config, world_size=1, stack=stack)
