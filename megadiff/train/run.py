"""Name the parts of a run that both loops have, and its folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megadiff.algorithms import Algorithm
from megadiff.checkpoint.checkpoints import Checkpoints
from megadiff.config.schema import Config
from megadiff.engines.base import Engine
from megadiff.observe.events import Events
from megadiff.parallel.collectives import agreed, all_reduce_max
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
            self.rescue.leave_together(code)
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
