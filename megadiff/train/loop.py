"""The loop: prompts → replicas → rewards → update → weights → next step. Every rank runs it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megadiff.algorithms import Algorithm
from megadiff.checkpoint.checkpoints import Checkpoints
from megadiff.config.schema import Config
from megadiff.data.sampler import PromptSampler
from megadiff.engines.base import Engine
from megadiff.models.adapter import ModelAdapter
from megadiff.parallel.mesh import Mesh
from megadiff.rewards.score import Scorer
from megadiff.rollout.client.fleet import Fleet
from megadiff.sync.sync import WeightSync
from megadiff.train import parity, probe
from megadiff.train.components import step_samplings
from megadiff.train.record import Recorder, rollout_metrics, sample_records
from megadiff.train.replicas import make_room, put_to_sleep
from megadiff.train.rescue import Rescue
from megadiff.train.sampling import group_requests, sample_and_score
from megadiff.train.update import update
from megadiff.types import Progress


@dataclass(frozen=True, kw_only=True)
class Run:
    """The parts of a run, built by `megadiff.train.build`."""

    config: Config
    mesh: Mesh
    adapter: ModelAdapter
    algorithm: Algorithm
    engine: Engine
    fleet: Fleet
    sync: WeightSync
    scorer: Scorer
    prompts: PromptSampler
    checkpoints: Checkpoints
    recorder: Recorder
    rescue: Rescue
    progress: Progress


def train(run: Run) -> None:
    """Trains until config.train.num_steps steps are finished; run.progress tells how far it came when it raises."""
    config, engine, progress, timers = run.config, run.engine, run.progress, run.recorder.timers
    samplings = step_samplings(config, run.adapter)
    put_to_sleep(run.fleet, run.sync, config, run.mesh)
    with timers("parity"):
        calls = probe.prepare(run.adapter, run.prompts.peek().prompts, config=config, mesh=run.mesh)
    make_room(config, run.mesh)
    run.sync.push(progress.step)
    with timers("parity"):
        gate = parity.check(
            engine, run.adapter, run.fleet, calls, config=config, mesh=run.mesh, step=progress.step
        )
    progress.recomputes = parity.recomputes(gate, config.algorithm, before=progress.recomputes)
    train_on = partial(
        update, engine, run.algorithm, config=config, mesh=run.mesh, recompute=progress.recomputes
    )
    gate = {} if progress.step else gate  # a resumed run logs what the uninterrupted one does
    run.recorder.start(progress.step)
    while progress.step < config.train.num_steps:
        with timers("step"):
            with timers("room"):
                make_room(config, run.mesh)
            with timers("sync"):
                stats = run.sync.push(progress.step)
            requests = group_requests(
                next(run.prompts),
                sampling=samplings[progress.step % len(samplings)],
                group_size=config.algorithm.group_size,
                seed=config.seed,
                step=progress.step,
                policy_version=progress.step,
            )
            groups, rewards = sample_and_score(
                run.fleet, run.scorer, requests, mesh=run.mesh, timers=timers
            )
            with timers("room"):
                put_to_sleep(run.fleet, run.sync, config, run.mesh)
            with timers("train"):
                stats |= train_on(groups, rewards, progress=progress)
            run.rescue.finish_step(progress, run.prompts.state())
            with timers("measure"):
                stats |= rollout_metrics(groups, rewards, step=progress.step, mesh=run.mesh)
        samples = partial(sample_records, groups, rewards, frames_per_s=run.adapter.frames_per_s)
        run.recorder.step(progress.step, stats | gate, samples)
        gate = {}
        if run.recorder.is_due(config.checkpoint.every, progress.step):
            run.checkpoints.save(engine, progress)
    make_room(config, run.mesh)
    run.sync.push(progress.step)
