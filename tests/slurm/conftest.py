"""A cluster of four nodes, and a way to submit runs of the tiny model to it."""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.conftest import CONFIG
from tests.slurm.cluster import Cluster, Job, reason_to_skip, wait_for

ROOT = Path(__file__).parents[2]
NODES = ("node1", "node2", "node3", "node4")
# what a run's processes have in their command lines
OURS = "megadiff|launch/"


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

    def wait_for_log(self, text: str, s: float = 120.0) -> None:
        """Wait for a text in the job's log, or fail with that log where the job ends before."""

        def is_there() -> bool:
            if text in self.logs():
                return True
            assert self.job.is_queued(), f"ended without {text!r}:\n{self.logs()}"
            return False

        wait_for(is_there, what=repr(text), s=s)

    def wait_for_checkpoint(self, step: int, s: float = 120.0) -> None:
        name = f"step_{step:06d}"

        def is_there() -> bool:
            latest = self.folder / "checkpoints/latest"
            if latest.exists() and latest.read_text().strip() >= name:
                return True
            assert self.job.is_queued(), f"ended without {name}:\n{self.logs()}"
            return False

        wait_for(is_there, what=name, s=s)

    def ends(self, state: str, s: float = 240.0) -> None:
        """Wait for its end, which must be this one, and nothing of it left on any node."""
        assert self.job.wait_until_ended(s) == state, self.logs()
        for node in NODES:
            count = ("bash", "-c", f"pgrep -fc '{OURS}' || true")
            wait_for(
                # pgrep's own bash has the pattern in its command line
                lambda: int(self.job.cluster.on(node, *count)) <= 1,  # noqa: B023
                what=f"end of what runs on {node}",
                s=15,
            )

    def logs(self) -> str:
        """Return the job's log and those of its nodes, for messages."""
        files = [self.log, *sorted(self.folder.glob("logs/*/*.log"))]
        texts = [f"== {file}\n{file.read_text()[-4000:]}" for file in files if file.exists()]
        return "\n".join(texts)


@dataclass(frozen=True, kw_only=True)
class Submitter:
    """Submits runs of the tiny model. folder: of all nodes."""

    cluster: Cluster
    folder: Path
    model: Path

    def __call__(
        self, name: str, *overrides: str, sbatch: tuple[str, ...] = (), **environment: str
    ) -> SlurmRun:
        """sbatch: its options. environment: settings of launch/slurm.sh."""
        config = self.folder / "base.yaml"
        config.write_text(CONFIG)
        log = self.folder / f"{name}.log"
        job = self.cluster.submit(
            f"--output={log}",
            *sbatch,
            "launch/slurm.sh",
            str(config),
            f"run.dir={self.folder}",
            f"run.name={name}",
            f"model.path={self.model}",
            "data.prompts=assets/prompts/colors.txt",
            "reward.color.type=color",
            "checkpoint.every=1",
            *overrides,
            environment={
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(ROOT),
                "MEGADIFF_TOKEN": "",
                **environment,
            },
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
    before = os.getcwd()
    os.chdir(ROOT)  # jobs are submitted from the repository
    cluster = Cluster(
        tmp_path_factory.mktemp("slurm") / "cluster", num_nodes=len(NODES), shared=shared
    )
    yield cluster
    cluster.close()
    os.chdir(before)


@pytest.fixture(scope="package")
def submit(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path):
    return Submitter(cluster=cluster, folder=tmp_path_factory.mktemp("runs"), model=tiny_model)
