"""The supervised loop: captioned images or pairs → update → next step. Every rank runs it."""

from __future__ import annotations

from dataclasses import dataclass

from megadiff.data.flow import FlowBatches
from megadiff.engines.sharded import NonFiniteError
from megadiff.parallel.collectives import agreed
from megadiff.train.policies import with_other_policies
from megadiff.train.run import RunParts


@dataclass(frozen=True, kw_only=True)
class SftRun(RunParts):
    """Add the samples' order."""

    batches: FlowBatches


def train_sft(run: SftRun) -> None:
    """Train until config.train.num_steps steps are finished.

    When it raises, run.progress tells how far it came.
    """
    engine = run.engine
    config = engine.config
    progress = run.progress
    timers = run.recorder.timers
    run.recorder.start(progress.step)

    while progress.step < config.train.num_steps:
        with run.recorder.profile(progress.step + 1), timers("step"):
            with timers("data"):
                # an image that cannot be read on one rank would leave the others in the update
                drawn = agreed(lambda: next(run.batches), engine.mesh.cpu_group)

            with timers("train"):
                try:
                    batch = with_other_policies(engine, run.algorithm, drawn)
                    stats = engine.update(batch, run.algorithm.loss)
                except NonFiniteError as error:  # no batch is stepped over: the data stay the same
                    number = progress.step + 1
                    raise NonFiniteError(f"step {number}: {error}; lower optim.lr") from error
            run.rescue.finish_step(progress, run.batches.state())
        run.recorder.step(progress.step, stats)  # behind finish_step: a rescue waits for the row
        run.end_step()

    run.checkpoints.settle()
