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
from megadiff.train import parity, probe
from megadiff.train.components import step_samplings
from megadiff.train.record import Recorder, rollout_metrics, sample_records, step_work
from megadiff.train.replicas import RunReplicas
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
    replicas: RunReplicas
    scorer: Scorer
    prompts: PromptSampler
    checkpoints: Checkpoints
    recorder: Recorder
    rescue: Rescue
    progress: Progress


def train(run: Run) -> None:
    """Train until num_steps steps are finished; run.progress tells how far it came."""
    config = run.config
    progress = run.progress
    timers = run.recorder.timers
    samplings = step_samplings(config, run.adapter)
    gate = pass_gate(run)
    train_on = partial(
        update,
        run.engine,
        run.algorithm,
        config=config,
        mesh=run.mesh,
        recompute=progress.recomputes,
    )
    run.recorder.start(progress.step)
    while progress.step < config.train.num_steps:
        with timers("step"):
            with run.replicas.awake(progress.step, timers) as stats:
                requests = group_requests(
                    next(run.prompts),
                    sampling=samplings[progress.step % len(samplings)],
                    group_size=config.algorithm.group_size,
                    seed=config.seed,
                    step=progress.step,
                    policy_version=progress.step,
                )
                groups, rewards = sample_and_score(
                    run.replicas.fleet, run.scorer, requests, mesh=run.mesh, timers=timers
                )
            with timers("train"):
                stats |= train_on(groups, rewards, progress=progress)
            run.rescue.finish_step(progress, run.prompts.state())
            with timers("measure"):
                stats |= rollout_metrics(groups, rewards, step=progress.step, mesh=run.mesh)
                stats |= step_work(groups, run.adapter, config, run.mesh)
        samples = partial(sample_records, groups, rewards, frames_per_s=run.adapter.frames_per_s)
        run.recorder.step(progress.step, stats | gate, samples)
        gate = {}  # its gaps belong to the first step
        if run.recorder.is_due(config.checkpoint.every, progress.step):
            run.checkpoints.save(run.engine, progress)
    run.replicas.wake(progress.step)  # they serve the trained policy


def pass_gate(run: Run) -> dict[str, float]:
    """Compare trainer and replicas before the first step. Collective.

    Returns the gaps to log; {} for a resumed run, which logs what the uninterrupted one does.
    Decides whether steps recompute old log_probs. Raises AgreedError where a gap is too large.
    """
    config = run.config
    mesh = run.mesh
    progress = run.progress
    timers = run.recorder.timers
    run.replicas.rest()  # preparing the calls needs the GPU's memory
    with timers("parity"):
        prompts = run.prompts.peek().prompts
        calls = probe.prepare(run.adapter, prompts, config=config, mesh=mesh)
    run.replicas.wake(progress.step)
    with timers("parity"):
        gaps = parity.check(
            run.engine,
            run.adapter,
            run.replicas,
            calls,
            config=config,
            mesh=mesh,
            step=progress.step,
        )
    before = progress.recomputes
    progress.recomputes = parity.recomputes(gaps, config.algorithm, before=before)
    return {} if progress.step else gaps
