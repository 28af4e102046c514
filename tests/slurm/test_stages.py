"""Trainers under a real Slurm whose replica is there already, on the head node.

So an attempt is short, and one job can have many of them.
"""

import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.test_invariance import assert_close
from tests.e2e.test_rescue import rows_of
from tests.slurm.cluster import wait_for
from tests.slurm.conftest import ENVIRONMENT, ROOT, Submitter

TOKEN = "0123456789abcdef-of-a-test"
HEAD = "10.213.7.100"
# The step after which each stage's attempt ends. A checkpoint is written behind its step's end.
STAGES = {
    "gate": 1,
    "rollout": 2,
    "reward": 3,
    "train": 4,
    "sync": 5,
    "evaluation": 6,
    "checkpoint": 8,
}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The launcher, with torchrun's ranks as asked.py and a dry run that takes no time."""
    repository = tmp_path_factory.mktemp("asked")
    shutil.copytree(ROOT / "launch", repository / "launch")
    programs = repository / ".venv/bin"
    programs.mkdir(parents=True)
    (programs / "megadiff").symlink_to(Path(__file__).with_name("stub.sh"))
    # A single rank needs no torchrun, whose imports take as long as its own.
    alone = f'[[ $1 == --standalone ]] && exec {sys.executable} -u -m tests.slurm.asked "${{@:6}}"'
    ranks = '-m torch.distributed.run "${@/#megadiff.cli.main/tests.slurm.asked}"'
    programs_of = {"python": ("", '"$@"'), "torchrun": (alone, ranks)}
    for name, (first, arguments) in programs_of.items():
        (programs / name).write_text(f"#!/bin/bash\n{first}\nexec {sys.executable} {arguments}\n")
        (programs / name).chmod(0o755)
    return repository


@pytest.fixture(scope="module")
def submit_asked(submit: Submitter, repository: Path, tiny_model: Path) -> Iterator[Submitter]:
    """Runs of the tiny model in separate mode, one after another on the same replica."""
    registry = submit.folder / "registry"
    registry.mkdir()
    serve = f"{sys.executable} -m megadiff.cli.main serve {tiny_model} --dtype float32 --port 0"
    place = f"--host {HEAD} --registry {registry} --name replica_0"
    command = f"{serve} {place} </dev/null &>{registry}.log & echo $!"
    environment = {**ENVIRONMENT, "MEGADIFF_TOKEN": TOKEN}
    pid = submit.cluster.login("bash", "-c", command, environment=environment)
    separate = ("rollout.mode=separate", f"rollout.registry={registry}")
    yield replace(submit, repository=repository, arguments=(*submit.arguments, *separate))
    submit.cluster.login("kill", "-KILL", pid.strip())


def test_usr1_in_every_stage_of_a_step_loses_nothing(submit_asked, one_process):
    """One job, queued again seven times."""
    run = submit_asked(
        "asked",
        "train.num_steps=9",
        "eval.every=6",
        sbatch=("--nodes=1",),
        MEGADIFF_TOKEN=TOKEN,
        ASK_IN=" ".join(STAGES),
        ASK_FOLDER=str(submit_asked.folder / "asked"),
    )
    run.ends("COMPLETED", s=400)
    for attempt, (stage, step) in enumerate(STAGES.items()):
        (log,) = run.folder.glob(f"logs/{run.job.number}.{attempt}/trainer-*.log")
        text = log.read_text()
        assert f"step {step} is saved; the same command continues" in text, (stage, text)
    assert run.log.read_text().count(": queued again\n") == len(STAGES)
    one_process.ends("COMPLETED")
    assert rows_of(run.folder) == rows_of(one_process.folder)


def test_the_killed_slurmd_of_the_first_node(submit_asked, one_process):
    """Its node's processes are left to themselves: the batch script and a rank.

    Slurm gives the node up after 10 s, ends the other rank and starts the run elsewhere.
    """
    run = submit_asked(
        "slurmd",
        "train.num_steps=3",
        sbatch=("--nodes=2",),
        MEGADIFF_TOKEN=TOKEN,
        PAUSE_S="60",
    )
    run.wait_for_checkpoint(1)
    cluster = run.job.cluster
    node, other = run.job.nodes()
    cluster.on(node, "pkill", "-KILL", "-x", "slurmd")
    wait_for(lambda: node not in run.job.nodes(), what=f"end without {node}", s=40)
    run.wait_for_log(f"job {run.job.number}.0: runs elsewhere by now", s=60)
    # the rank sees that it is alone, and nobody waits for it
    wait_for(lambda: not run.left_on(node), what=f"end of {run.left_on(node)} on {node}", s=15)
    first_attempt = f"--rdzv-id {run.job.number}.0 "
    assert not [line for line in run.left_on(other) if first_attempt in line]
    cluster.start_slurmd(node)

    run.ends("COMPLETED")
    assert run.log.read_text().count(": queued again\n") == 0
    assert (run.folder / "logs/latest").readlink().name == f"{run.job.number}.1"
    one_process.ends("COMPLETED")
    assert_close(run.rows(), one_process.steps(3))
