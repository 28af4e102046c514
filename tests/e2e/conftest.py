"""Real replicas, shared by the tests of the whole path, and a way to run the trainer as a user
does.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from megadiff.cli.train import main
from tests.distributed.ranks import run_command, run_ranks
from tests.e2e.servers import ENVIRONMENT, ROOT, Forked, start_replicas, stop

CONFIG = """
run: {device: cpu}
model: {dtype: float32}
train: {num_steps: 3, prompts_per_step: 4, updates_per_step: 2, microbatch_size: 4}
algorithm: {group_size: 2, clip_range: 1e-4}
rollout:
  height: 64
  width: 64
  num_inference_steps: 6
  sde_window_range: [0, 4]
  start_timeout_s: 240
engine: {dtype: float32}
optim: {lr: 1e-4}
parallel: {dp: 0}
track: []
"""
# The gate is a third of what such a short run computes. Runs whose test is about it ask for it.
GATED = "parity.mode=refuse"
UNGATED = "parity.mode=off"


@dataclass(frozen=True)
class Result:
    code: int
    stderr: str
    folder: Path

    @property
    def rows(self) -> list[dict]:
        return [
            json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()
        ]


@dataclass(frozen=True)
class Trainer:
    """Runs `megadiff train` with small defaults in its own folder."""

    folder: Path
    model: Path

    def command(self, *overrides: str, num_processes: int = 1, name: str = "run") -> list[str]:
        launcher = [sys.executable, "-m", "megadiff.cli.train"]
        if num_processes > 1:
            torchrun = [
                "torch.distributed.run",
                "--standalone",
                f"--nproc-per-node={num_processes}",
            ]
            launcher = [sys.executable, "-m", *torchrun, "-m", "megadiff.cli.main", "train"]
        base = self.folder / "base.yaml"
        base.write_text(CONFIG)
        fixed = [f"run.dir={self.folder}", f"run.name={name}", f"model.path={self.model}"]
        prompts = (
            []
            if any(override.startswith("data.prompts") for override in overrides)
            else [f"data.prompts={ROOT / 'assets/prompts/colors.txt'}"]
        )
        rewards = (
            []
            if any(override.startswith("reward.") for override in overrides)
            else ["reward.color.type=color"]
        )
        gate = [] if any(override.startswith("parity.") for override in overrides) else [UNGATED]
        return [*launcher, str(base), *fixed, *prompts, *rewards, *gate, *overrides]

    def run(
        self,
        *overrides: str,
        num_processes: int = 1,
        name: str = "run",
        timeout_s: float = 300,
        prepare: Callable[[], object] | None = None,
    ) -> Result:
        """In a process that is forked, and for several, in ranks that torchrun starts.

        prepare: see run_command.
        """
        command = self.command(*overrides, num_processes=num_processes, name=name)
        if num_processes > 1:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                env=ENVIRONMENT,
                cwd=self.folder,
            )
            return Result(code=done.returncode, stderr=done.stderr, folder=self.folder / name)
        done = run_command(
            main,
            command[3:],
            folder=self.folder,
            environment=ENVIRONMENT,
            prepare=prepare,
            timeout_s=timeout_s,
        )
        return Result(code=done.code, stderr=done.stderr, folder=self.folder / name)


@pytest.fixture
def trainer(tmp_path, tiny_model) -> Trainer:
    return Trainer(tmp_path, Path(tiny_model))


@pytest.fixture(scope="module")
def in_ranks(tmp_path_factory, tiny_model) -> Callable[..., Result]:
    """Runs `megadiff train` as torchrun does, in processes that have their imports behind them:
    (run's name, number of ranks, *overrides, worker=). Fails with the traceback of the rank that
    fails. worker: what each rank calls with the command's arguments.
    """
    trainer = Trainer(tmp_path_factory.mktemp("ranks"), tiny_model)
    return lambda name, num_processes, *overrides, **worker: train_in_ranks(
        trainer, name, num_processes, *overrides, **worker
    )


def train_rank(arguments: list[str]) -> None:
    if (
        "WORLD_SIZE" in os.environ
    ):  # else one thread: two, on cores that others use too, wait for each other
        os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]
    assert main(arguments) == 0


def train_in_ranks(
    trainer: Trainer,
    name: str,
    num_processes: int,
    *overrides: str,
    worker: Callable[[list[str]], None] = train_rank,
) -> Result:
    arguments = trainer.command(*overrides, name=name)
    # compiled blocks take minutes on a slow machine
    ours = arguments[arguments.index("megadiff.cli.train") + 1 :]
    run_ranks(worker, num_processes, ours, timeout_s=600)
    return Result(code=0, stderr="", folder=trainer.folder / name)


@pytest.fixture(scope="package")  # idle replicas poll: they end with the last test of this folder
def registry(tmp_path_factory, tiny_model):
    """Two float32 replicas of the tiny model, as `megadiff serve --registry` announces them; disk
    pushes go by `weights` beside the registry.
    """
    folder = tmp_path_factory.mktemp("replicas")
    command = ["-m", "megadiff.cli.serve", str(tiny_model), "--dtype", "float32", "--device", "cpu"]
    servers = start_replicas(
        2, folder=folder, command=[*command, "--weights", str(folder / "weights")]
    )
    yield folder / "registry"
    stop(servers)


@pytest.fixture(scope="package")
def wan_registries(tmp_path_factory, tiny_wan):
    """Kind → the registry of one float32 replica of that tiny Wan2.2, as
    `registry` above.
    """
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in ("ti2v_5b", "t2v_a14b")}

    def start(kind: str) -> list[Forked]:
        command = ["-m", "megadiff.cli.serve", str(tiny_wan[kind]), "--dtype", "float32"]
        return start_replicas(
            1, folder=folders[kind], command=[*command, "--weights", str(folders[kind] / "weights")]
        )

    with ThreadPoolExecutor(len(folders)) as pool:
        servers = [server for started in pool.map(start, folders) for server in started]
    yield {kind: folder / "registry" for kind, folder in folders.items()}
    stop(servers)
