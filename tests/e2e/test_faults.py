"""What goes wrong ends in a clear message and a non-zero exit within seconds; nothing is lost,
nothing is left running.
"""

import json
import os
import resource
import shutil
import signal
import time
from functools import partial

import psutil
import pytest

from megadiff.checkpoint.run_folders import whole_looking
from megadiff.cli.train import main
from tests.distributed.ranks import Command
from tests.e2e.asking import by_file
from tests.e2e.conftest import GATED
from tests.e2e.servers import fork_replica
from tests.e2e.test_rescue import forked_trainer, give_replicas_back, rows_of
from tests.e2e.test_stop import EX_TEMPFAIL
from tests.extra import cases

LONG_PROMPT = "a red " + "very " * 399 + "x"  # 2002 characters


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["train.num_step=3"], "unknown key train.num_step; did you mean train.num_steps"),
        (["optim.lr=fast"], "optim.lr='fast' is no number"),
        (["data.prompts=nowhere.txt"], "nowhere.txt"),
        (["data.prompts={folder}/empty.txt"], "empty.txt"),
        (["data.prompts={folder}/long.txt"], "2002"),
        (
            ["data.prompts={folder}/many_tokens.txt"],
            "tokens (2000 characters), the model takes 1024",
        ),
        (["model.path={folder}/nowhere"], "nowhere does not exist"),
        (["model.path={folder}/half"], "vae"),
        (["model.path={folder}/torn"], "not a whole safetensors file"),
        (["parallel.dp=2"], "world_size=1 != dp*sp*tp = 2*1*1 = 2"),
        (["parallel.sp=2"], "world_size=1 is not a multiple of sp*tp = 2*1 = 2"),
        (["parallel.dp_replicate=2"], "parallel.dp=1 is not a multiple of parallel.dp_replicate=2"),
        (
            ["train.updates_per_step=3"],
            "algorithm.group_size=2 is not a multiple of train.updates_per_step=3",
        ),
        (["rollout.sde_window_size=5"], "rollout.sde_window_size=5 > 4"),
        (["rollout.sde_window_range=[0,6]"], "the last step (to sigma 0) is never stochastic"),
        (["rollout.height=60"], "rollout.height=60 is not a positive multiple of 16"),
        (["reward.x.type=colour"], "color"),
        (["data.prompts={folder}/no_color.txt"], "a house"),
    ],
)
def test_mistakes_of_the_user(trainer, capsys, overrides, text):
    folder = trainer.folder
    (folder / "empty.txt").write_text("\n\n")
    (folder / "long.txt").write_text(LONG_PROMPT + "\n")
    (folder / "many_tokens.txt").write_text("a red cup " + "!?" * 995 + "\n")
    (folder / "no_color.txt").write_text("a red cup\na house\n")
    shutil.copytree(trainer.model, folder / "half", ignore=lambda *_: {"vae"})
    shutil.copytree(trainer.model, folder / "torn")
    weights = folder / "torn" / "transformer" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    overrides = [override.format(folder=folder) for override in overrides]
    with_world = [*trainer.command(*overrides)[3:], "--dry-run"]
    started = time.monotonic()
    assert main(with_world) == 2
    assert time.monotonic() - started < 10
    assert text in capsys.readouterr().err
    assert not (folder / "run").exists()


def test_sizes_that_do_not_divide_over_ranks(trainer, capsys):
    arguments = [*trainer.command("train.prompts_per_step=6")[3:], "--dry-run", "--world-size", "4"]
    assert main(arguments) == 2
    assert "train.prompts_per_step=6 is not a multiple of dp=4" in capsys.readouterr().err
    arguments = [
        *trainer.command("parallel.sp=2", "parallel.dp=3")[3:],
        "--dry-run",
        "--world-size",
        "4",
    ]
    assert main(arguments) == 2
    assert "world_size=4 != dp*sp*tp = 3*2*1 = 6; set parallel.dp=2" in capsys.readouterr().err


def test_tensor_parallel_is_refused_with_the_way_out(trainer, capsys):
    arguments = [*trainer.command("parallel.tp=2")[3:], "--dry-run", "--world-size", "2"]
    assert main(arguments) == 2
    message = (
        "parallel.tp=2 with engine.backend=veomni, which has no such thing; set "
        "parallel.tp=1, or engine.backend=megatron"
    )
    assert message in capsys.readouterr().err


def test_unicode_and_long_prompts_train(trainer, registry):
    prompts = trainer.folder / "prompts.txt"
    longest = ("a red " + "photo of a red " * 200)[:1000]
    prompts.write_text(f"a red 猫 🐈 on a mat\n{longest}\n", encoding="utf-8")
    result = trainer.run(
        f"data.prompts={prompts}",
        "rollout.mode=separate",
        f"rollout.registry={registry}",
        "train.prompts_per_step=2",
        "train.num_steps=1",
        "sample_every=1",
    )
    assert result.code == 0, result.stderr
    captions = (result.folder / "samples" / "step_000001" / "samples.jsonl").read_text(
        encoding="utf-8"
    )
    assert "猫 🐈" in captions and longest in captions


def test_a_reward_that_raises_names_itself_and_the_sample_and_loses_nothing(trainer, registry):
    shared = ["rollout.mode=separate", f"rollout.registry={registry}"]
    result = trainer.run(*shared, "reward.judge.type=tests.e2e.failing_reward:FailingReward")
    assert result.code == 1
    assert "reward 'judge' on sample" in result.stderr and "the judge is out" in result.stderr
    assert result.stderr.count("Traceback") == 1  # the user's own
    assert "failing_reward.py" in result.stderr
    assert [path.name for path in whole_looking(result.folder / "checkpoints")] == ["step_000002"]
    again = trainer.run(*shared, "reward.color.type=color")
    assert again.code == 0 and [row["step"] for row in again.rows] == [1, 2, 3]


def test_full_disk_while_saving(trainer, registry):
    """A file-size limit stands for the full disk: the write fails with an OSError half-way."""
    shared = ["rollout.mode=separate", f"rollout.registry={registry}", "train.num_steps=1"]
    assert trainer.run(*shared).code == 0
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    done = trainer.run(*shared[:2], "train.num_steps=2", prepare=limit)
    assert done.code == 1
    assert "step_000002 could not be written" in done.stderr and "File too large" in done.stderr
    (kept,) = whole_looking(trainer.folder / "run" / "checkpoints")
    assert kept.name == "step_000001"


def test_two_runs_in_one_folder(trainer, registry, start):
    shared = ["rollout.mode=separate", f"rollout.registry={registry}"]
    start(*shared, "train.num_steps=1000", "rollout.num_inference_steps=50")
    _wait_for(lambda: (trainer.folder / "run" / "config.yaml").exists())
    second = trainer.run(*shared)
    assert second.code == 2 and "is in use by another run" in second.stderr


def test_a_replica_that_dies_again_and_again_ends_the_run_which_is_saved(trainer, registry, start):
    process = start("train.num_steps=1000", "rollout.max_restarts=0")
    metrics = trainer.folder / "run" / "metrics.jsonl"
    _wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2)
    (replica,) = _replicas(process.pid)
    replica.kill()
    assert process.wait(60) == 1
    stderr = process.err.read_text()
    assert (
        f"replica_0 (pid {replica.pid}) was killed by SIGKILL" in stderr and "the end of" in stderr
    )
    finished = metrics.read_text().count("\n")
    assert whole_looking(trainer.folder / "run" / "checkpoints")[-1].name == f"step_{finished:06d}"
    again = trainer.run(
        f"train.num_steps={finished + 1}", "rollout.mode=separate", f"rollout.registry={registry}"
    )
    assert again.code == 0, again.stderr
    assert [row["step"] for row in again.rows] == list(range(1, finished + 2))


def test_separate_replicas_come_and_go_and_no_bit_changes(trainer, registry, start):
    """One joins, one leaves by SIGTERM, and the last is stopped: the step waits for another. The
    stopped one wakes up, gets the policy first, and serves again.
    """
    command = ["-m", "megadiff.cli.serve", str(trainer.model), "--dtype", "float32"]
    fork = partial(fork_replica, folder=trainer.folder, command=command)
    run = trainer.folder / "run"
    ours = f"rollout.registry={trainer.folder / 'registry'}"
    keys = ["rollout.mode=separate", "checkpoint.every=0", GATED]  # who joins passes it, too

    def happened(text: str) -> bool:
        file = run / "events.jsonl"
        return file.exists() and text in file.read_text()

    def goes_on() -> None:
        steps = len(rows_of(run)) if (run / "metrics.jsonl").exists() else 0
        _wait_for(lambda: (run / "metrics.jsonl").exists() and len(rows_of(run)) > steps + 1)

    servers = [fork("first")]
    try:
        process = start(*keys, ours, "train.num_steps=1000", "rollout.heartbeat_s=6")
        goes_on()
        servers.append(fork("second"))
        _wait_for(lambda: happened('"replica_joined", "replica": "second"'))
        goes_on()
        servers[0].terminate()
        assert servers[0].wait(60) == 0
        _wait_for(lambda: happened('"replica_left", "replica": "first"'))
        goes_on()

        servers[1].send_signal(signal.SIGSTOP)
        _wait_for(lambda: happened("it has not answered for"))
        servers.append(fork("third"))
        goes_on()
        servers[1].send_signal(signal.SIGCONT)
        _wait_for(lambda: (run / "events.jsonl").read_text().count('"replica": "second"') > 2)
        goes_on()
        by_file(run)
        process.wait(60)
    finally:
        for server in servers:
            server.kill()
    stderr = process.err.read_text()
    assert process.returncode == EX_TEMPFAIL, stderr
    before, _, after = stderr.partition("third joins at")
    assert "second is lost: it has not answered for" in before and "serves again" not in before
    assert "second serves again" in after

    lines = (run / "metrics.jsonl").read_text().splitlines()
    serving = [json.loads(line)["rollout/replicas"] for line in lines]
    assert serving[0] == 1 and set(serving) == {1, 2}

    disturbed = rows_of(run)
    steps = f"train.num_steps={len(disturbed)}"
    calm = trainer.run(*keys, f"rollout.registry={registry}", steps, name="calm")
    assert calm.code == 0, calm.stderr
    assert rows_of(calm.folder) == disturbed


@pytest.mark.parametrize(
    ("how", "num_replicas"),
    cases([(signal.SIGTERM, 2), (signal.SIGKILL, 1)], extra_ones=[(signal.SIGTERM, 2)]),
)
def test_no_orphan_is_left(trainer, start, how, num_replicas):
    process = start("train.num_steps=1000", f"rollout.num_replicas={num_replicas}")
    _wait_for(lambda: (trainer.folder / "run" / "metrics.jsonl").exists())
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(_replicas(process.pid)) == num_replicas
    process.send_signal(how)
    assert process.wait(30) == (143 if how == signal.SIGTERM else -signal.SIGKILL)
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive


@pytest.fixture
def start(trainer, registry):
    """Starts trainers in the background; what the test leaves running is killed."""
    started = []

    def start_one(*overrides) -> Command:
        command = trainer.command(*overrides)
        started.append(forked_trainer(command, trainer.folder, trainer.folder / "stderr.txt"))
        return started[-1]

    yield start_one
    for process in started:
        process.kill()
        process.wait(30)
        give_replicas_back(registry)


def _replicas(pid: int) -> list[psutil.Process]:
    """The server processes that a trainer started: `-m megadiff.cli.serve` leads its own process
    group.
    """
    children = psutil.Process(pid).children(recursive=True)
    return [child for child in children if os.getpgid(child.pid) == child.pid]


def _wait_for(condition, timeout_s: float = 180) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.2)
