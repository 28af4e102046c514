"""The loop: prompts → replicas → rewards → update → weights → next step. Every rank runs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from megadiff.data.sampler import PromptSampler
from megadiff.train import parity, probe
from megadiff.train.batches import BatchSource
from megadiff.train.diversity_figures import DiversityFigures
from megadiff.train.record import sample_records, step_work
from megadiff.train.reward_metrics import reward_metrics
from megadiff.train.run import RunParts
from megadiff.train.run_replicas import RunReplicas
from megadiff.train.update import update
from megadiff.types import Figures


@dataclass(frozen=True, kw_only=True)
class Run(RunParts):
    """Add what samples and scores."""

    replicas: RunReplicas
    prompts: PromptSampler
    batches: BatchSource


def train(run: Run) -> None:
    """Train until num_steps steps are finished; run.progress tells how far it came."""
    engine = run.engine
    config = engine.config
    mesh = engine.mesh
    progress = run.progress
    timers = run.recorder.timers

    gate = pass_gate(run)
    run.recorder.start(progress.step)

    while progress.step < config.train.num_steps:
        with run.recorder.profile(progress.step + 1), timers("step"):
            drawn, stats = run.batches.take(progress.step)
            groups = drawn.groups
            rewards = drawn.rewards
            diversity = DiversityFigures(groups)
            with timers("train"):
                figures, trained = update(engine, run.algorithm, groups, rewards, progress=progress)
                stats |= figures
            run.rescue.finish_step(progress, run.batches.position())

            with timers("measure"):
                stats |= reward_metrics(rewards, drawn.figures, mesh)
                stats |= diversity.metrics(mesh)
                stats |= step_work(
                    groups, trained, engine.adapter, run.algorithm, config=config, mesh=mesh
                )
        samples = partial(sample_records, groups, rewards, frames_per_s=engine.adapter.frames_per_s)
        run.recorder.step(progress.step, stats | gate, samples)
        del drawn, groups, trained, rewards, diversity, samples  # pixels, before the next ones come
        gate = {}  # its gaps belong to the first step
        run.end_step()

    run.replicas.wake(progress.step)  # they serve the trained policy
    run.checkpoints.settle()


def pass_gate(run: Run) -> dict[str, float]:
    """Compare trainer and replicas before the first step. Collective.

    Returns the gaps to log; {} for a resumed run, which logs what the uninterrupted one does.
    Decides whether steps recompute old log_probs, and again when replicas join later. Raises
    AgreedError where a gap is too large.
    """
    engine = run.engine
    progress = run.progress
    timers = run.recorder.timers
    run.replicas.rest()  # preparing the calls needs the GPU's memory

    with timers("parity"):
        prompts = run.prompts.peek().prompts
        calls = probe.prepare(engine.adapter, prompts, config=engine.config, mesh=engine.mesh)

    run.replicas.wake(progress.step)
    with timers("parity"):
        gaps = run.replicas.retry(
            lambda: parity.check(engine, run.replicas, calls, step=progress.step)
        )

    def choose_old_log_probs(gaps: Figures) -> None:
        """Decide from gaps that are equal on all ranks, so that all decide alike."""
        if run.algorithm.rows == "steps":  # else no log_prob is compared with the replicas'
            settings = engine.config.algorithm
            progress.recomputes = parity.recomputes(gaps, settings, before=progress.recomputes)

    def admit(names: Sequence[str]) -> None:
        step = run.replicas.version
        # a newcomer may round more than those before it, e.g. on another kind of GPU
        choose_old_log_probs(parity.check(engine, run.replicas, calls, step=step, names=names))

    run.replicas.gate = admit  # for those that join later

    choose_old_log_probs(gaps)
    return {} if progress.step else gaps
