"""A cluster of eight nodes, and a way to submit runs of the tiny model to it.

Tests have the first four nodes. On the next two runs go on beside them that wait for nobody. For
Slurm the last two have GPUs.
"""

import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.conftest import CONFIG
from tests.slurm.cluster import Cluster, Job, reason_to_skip, wait_for

ROOT = Path(__file__).parents[2]
NODES = ("node1", "node2", "node3", "node4", "node5", "node6", "node7", "node8")
BESIDE = {"one_process": "node5", "asked": "node6"}  # fixtures, each a run on a node of its own
# what runs on a node without a job, and the question itself
IDLE = re.compile(r"slurmd -D|ps -eo|sleep |bash .*cluster\.sh node ")
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
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "MEGADIFF_TOKEN": ""}


@dataclass(frozen=True, kw_only=True)
class SlurmRun:
    """A job that runs launch/slurm.sh. folder: the run's."""

    job: Job
    folder: Path
    log: Path

    def rows(self) -> list[dict]:
        file = self.folder / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line) for line in lines]

    def steps(self, count: int) -> list[dict]:
        """Return the rows of the first steps, without an evaluation before them."""
        return [row for row in self.rows() if 1 <= row["step"] <= count]

    def wait_for_log(self, text: str, s: float = 120.0) -> None:
        """Wait for a text in the job's log, or fail with that log where the job ends before."""

        def is_there() -> bool:
            if text in self.logs():
                return True
            assert self.job.is_queued(), f"ended without {text!r}:\n{self.logs()}"
            return False

        wait_for(is_there, what=repr(text), s=s)

    def wait_for_checkpoint(self, step: int, s: float = 120.0) -> None:
        def is_there() -> bool:
            latest = self.folder / "checkpoints/latest"
            if latest.exists() and int(latest.read_text().removeprefix("step_") or 0) >= step:
                return True
            assert self.job.is_queued(), f"ended before step {step}:\n{self.logs()}"
            return False

        wait_for(is_there, what=f"checkpoint of step {step}", s=s)

    def ends(self, state: str, s: float = 240.0) -> None:
        """Wait for its end, which must be this one, and nothing left on any node without a job."""
        assert self.job.wait_until_ended(s) == state, self.logs()
        for node in NODES:
            wait_for(
                partial(self.is_left_alone, node),
                what=lambda: f"end of {self.left_on(node)} on {node}",  # noqa: B023
                s=60,
            )

    def is_left_alone(self, node: str) -> bool:
        """Say whether nothing runs there, or what runs there is of a job."""
        return not self.left_on(node) or node in self.job.cluster.used_nodes()

    def left_on(self, node: str) -> list[str]:
        """Return the command lines of what still runs there."""
        lines = self.job.cluster.on(node, "ps", "-eo", "args=").splitlines()
        return [line[:200] for line in lines if not IDLE.match(line)]

    def logs(self) -> str:
        """Return the job's log and those of its nodes, for messages."""
        files = [self.log, *sorted(self.folder.glob("logs/*/*.log"))]
        texts = [f"== {file}\n{file.read_text()[-4000:]}" for file in files if file.exists()]
        return "\n".join(texts)


@dataclass(frozen=True, kw_only=True)
class Submitter:
    """Submits runs with these arguments from a repository. folder: of all nodes."""

    cluster: Cluster
    folder: Path
    repository: Path
    arguments: tuple[str, ...]

    def __call__(
        self, name: str, *overrides: str, sbatch: tuple[str, ...] = (), **environment: str
    ) -> SlurmRun:
        """sbatch: its options. environment: settings of launch/slurm.sh."""
        log = self.folder / f"{name}.log"
        job = self.cluster.submit(
            f"--output={log}",
            f"--chdir={self.repository}",
            *sbatch,
            str(ROOT / "launch/slurm.sh"),
            *self.arguments,
            f"run.dir={self.folder}",
            f"run.name={name}",
            *overrides,
            environment={**ENVIRONMENT, **environment},
        )
        return SlurmRun(job=job, folder=self.folder / name, log=log)


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    reason = reason_to_skip()
    if reason:
        pytest.skip(reason)
    base = tmp_path_factory.getbasetemp()
    # The rest of /tmp is each node's own.
    shared = [base, *(path for path in (ROOT, Path(sys.prefix)) if path.is_relative_to("/tmp"))]
    folder = tmp_path_factory.mktemp("slurm") / "cluster"
    cluster = Cluster(folder, num_nodes=len(NODES), num_gpu_nodes=2, shared=shared)
    yield cluster
    cluster.close()


@pytest.fixture(scope="package", autouse=True)
def beside(request: pytest.FixtureRequest) -> None:
    """Submit the runs that this session's tests ask for and that wait for nobody.

    Half of such a run's time Slurm waits before it starts it again.
    """
    for name in BESIDE:
        if any(name in getattr(item, "fixturenames", ()) for item in request.session.items):
            request.getfixturevalue(name)


@pytest.fixture(scope="package")
def submit(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path
) -> Submitter:
    """Runs of the tiny model, as a user submits them."""
    folder = tmp_path_factory.mktemp("runs")
    config = folder / "base.yaml"
    config.write_text(CONFIG)
    held_out = folder / "held_out.txt"
    held_out.write_text("a green wall\na black wall\n")
    arguments = (
        str(config),
        f"model.path={tiny_model}",
        f"data.prompts={ROOT}/assets/prompts/colors.txt",
        "reward.color.type=color",
        "checkpoint.every=1",
        # one call a step, with a replica on this node or another: bits depend on the cut
        "algorithm.group_size=4",
        "algorithm.kl_coef=0.04",
        f"eval.prompts={held_out}",
        "eval.num_samples=4",
    )
    return Submitter(cluster=cluster, folder=folder, repository=ROOT, arguments=arguments)


@pytest.fixture(scope="package")
def one_process(submit: Submitter) -> SlurmRun:
    """One rank and its replica on one node."""
    return submit("one", "train.num_steps=9", "eval.every=6", sbatch=on(BESIDE["one_process"]))


@pytest.fixture(scope="package")
def submit_stub(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Submitter:
    """Runs of stub.sh: the launcher is real, and so is all that Slurm does."""
    repository = tmp_path_factory.mktemp("stub")
    shutil.copytree(ROOT / "launch", repository / "launch")
    programs = repository / ".venv/bin"
    programs.mkdir(parents=True)
    for name in ("megadiff", "torchrun"):
        (programs / name).symlink_to(Path(__file__).with_name("stub.sh"))
    (programs / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (programs / "python").chmod(0o755)
    return Submitter(
        cluster=cluster,
        folder=tmp_path_factory.mktemp("stub_runs"),
        repository=repository,
        arguments=("stub.yaml",),
    )


@pytest.fixture(scope="package")
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


@pytest.fixture(scope="package")
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


@pytest.fixture(scope="package")
def asked(submit_asked: Submitter) -> SlurmRun:
    """One job, asked to stop in every stage and queued again after each."""
    return submit_asked(
        "asked",
        "train.num_steps=9",
        "eval.every=6",
        sbatch=on(BESIDE["asked"]),
        MEGADIFF_TOKEN=TOKEN,
        ASK_IN=" ".join(STAGES),
        ASK_FOLDER=str(submit_asked.folder / "asked"),
    )


def on(node: str) -> tuple[str, ...]:
    """Return sbatch's options for a run on this node alone."""
    return ("--nodes=1", f"--nodelist={node}")
