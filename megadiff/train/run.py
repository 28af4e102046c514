"""Name the parts of a run that both loops have, and its folder."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megadiff.algorithms import Algorithm
from megadiff.checkpoint.checkpoints import Checkpoints
from megadiff.config.schema import Config
from megadiff.engines.engine import Engine
from megadiff.observe.events import Events
from megadiff.parallel.collectives import agreed, all_reduce_max, any_rank
from megadiff.process.garbage import FirstRounds
from megadiff.train.record import Recorder
from megadiff.train.rescue import Rescue
from megadiff.types import Progress


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """Hold what trains, saves and records, built by `megadiff.train.build`.

    compiling: the steps of this process in which torch compiles.
    """

    engine: Engine
    algorithm: Algorithm
    checkpoints: Checkpoints
    recorder: Recorder
    rescue: Rescue
    progress: Progress
    compiling: FirstRounds
    events: Events

    def end_step(self) -> None:
        """Save where a checkpoint is due, and leave where somebody asked for it. Collective.

        Raises SystemExit on all ranks when the run ends on request before its last step.
        """
        num_steps = self.engine.config.train.num_steps
        mesh = self.engine.mesh
        requests = self.rescue.requests
        # every rank's word: a signal may have reached any one of them
        code = int(all_reduce_max({"code": requests.agreed_code()}, mesh.cpu_group)["code"])
        stops = code >= 0 and self.progress.step < num_steps
        if stops:
            # Before: it may take as long as a rollout, and a rescue may have to end it.
            self.checkpoints.settle_beside()
            stops = self.rescue.leave_together(code, partial(any_rank, group=mesh.cpu_group))
        if stops:
            self.checkpoints.save(self.engine, self.progress)
            self.checkpoints.settle()
        else:
            self.checkpoints.after_step(self.engine, self.progress)

        requests.save_s = self.checkpoints.write_s or requests.save_s
        requests.step_ended()
        self.events.step = self.progress.step + 1
        if stops:
            # all ranks wait for it: torchrun ends them when the first of them ends
            agreed(self.rescue.say_stopped, mesh.cpu_group, here=mesh.rank == 0)
            raise SystemExit(code)

        self.compiling.end()


def run_folder(config: Config) -> Path:
    """Return runs/<name>."""
    return Path(config.run.dir) / config.run.name


def make_run_folder(config: Config) -> Path:
    """Make the run's folder and return it. Raises ValueError where run.dir cannot be written."""
    folder = run_folder(config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(_not_writable(config, error.strerror or str(error))) from error
    return folder


def check_run_folder(config: Config) -> None:
    """Raise ValueError where it is plain, without making anything, that run.dir is not writable."""
    folder = run_folder(config).absolute()
    nearest = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not nearest.is_dir():
        raise ValueError(_not_writable(config, f"{nearest} is no folder"))
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ValueError(_not_writable(config, f"{nearest} is not yours to write"))


def _not_writable(config: Config, reason: str) -> str:
    return (
        f"run.dir={config.run.dir}: {run_folder(config)} cannot be written ({reason}); set run.dir "
        "to a folder that you may write"
    )
