"""The supervised loop: captioned images → update → next step. Every rank runs it."""

from __future__ import annotations

from dataclasses import dataclass

from megadiff.algorithms import Algorithm
from megadiff.checkpoint.checkpoints import Checkpoints
from megadiff.config.schema import Config
from megadiff.data.flow import FlowBatches
from megadiff.engines.base import Engine, NonFiniteError
from megadiff.parallel.collectives import agreed
from megadiff.parallel.mesh import Mesh
from megadiff.train.record import Recorder
from megadiff.train.rescue import Rescue
from megadiff.types import Progress


@dataclass(frozen=True, kw_only=True)
class SftRun:
    """The parts of a supervised run, built by `megadiff.train.build_sft`."""

    config: Config
    mesh: Mesh
    algorithm: Algorithm
    engine: Engine
    batches: FlowBatches
    checkpoints: Checkpoints
    recorder: Recorder
    rescue: Rescue
    progress: Progress


def train_sft(run: SftRun) -> None:
    """Train until config.train.num_steps steps are finished.

    When it raises, run.progress tells how far it came.
    """
    config = run.config
    progress = run.progress
    timers = run.recorder.timers
    run.recorder.start(progress.step)
    while progress.step < config.train.num_steps:
        with timers("step"):
            with timers("data"):
                batch = agreed(lambda: next(run.batches), run.mesh.cpu_group)
            with timers("train"):
                try:
                    stats = run.engine.update(batch, run.algorithm.loss)
                except NonFiniteError as error:
                    number = progress.step + 1
                    raise NonFiniteError(f"step {number}: {error}; lower optim.lr") from error
            run.rescue.finish_step(progress, run.batches.state())
        run.recorder.step(progress.step, stats)
        if run.recorder.is_due(config.checkpoint.every, progress.step):
            run.checkpoints.save(run.engine, progress)
