"""Get the scored samples of each step: drawn when they are needed, or one step ahead.

With train.staleness=1 the samples of step k + 1 are drawn with version k - 1 of the weights, while
update k makes version k of them. The lag is fixed and not raced, so a run is a function of its
config. In code steps count from 0: those of `step` are drawn with version max(0, step - 1).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from megadiff.data.sampler import PromptSampler
from megadiff.engines.engine import Engine
from megadiff.observe.timers import Timers
from megadiff.parallel.collectives import agreed, all_reduce_sums, any_rank, gather_json_at
from megadiff.rewards.score import TOTAL, Scorer
from megadiff.rollout.client.report import Report, no_report
from megadiff.train.batch_files import StepSamples, drop_incomplete, identity, write_batch
from megadiff.train.components import step_samplings
from megadiff.train.replica_figures import SlowReplicas, calls_of_all, replica_figures
from megadiff.train.run_replicas import RunReplicas
from megadiff.train.sampling import Draw, Rewards, group_requests, share
from megadiff.types import Figures, PromptBatch, RolloutGroup, RolloutRequest

logger = logging.getLogger(__name__)


class StepDraw(Draw):
    """Draw a step's groups on one rank; start() lets that begin in a thread.

    scored: groups, rewards and the rewards' own figures, once all are there.
    """

    scored: tuple[list[RolloutGroup], Rewards, dict[str, Figures]] | None = None
    _thread: threading.Thread | None = None
    _error: BaseException | None = None

    def start(self) -> None:
        """Draw and score in a thread. run() waits for it, and raises what it raised."""
        # A daemon: replicas or rewards that hang must not keep the process.
        self._thread = threading.Thread(target=self._draw, name="draw-ahead", daemon=True)
        self._thread.start()

    def run(self) -> bool:
        """Ask for the groups that are missing, or wait for the thread that does so."""
        thread = self._thread
        if thread is None:
            return super().run()

        thread.join()
        self._thread = None  # who runs it again asks for what the thread did not get
        if self._error:
            raise self._error
        return self.scored is not None

    def result(self) -> tuple[list[RolloutGroup], Rewards]:
        """Return the groups and rewards; waits for the scores."""
        if self.scored is None:
            groups, rewards = super().result()
            # at once, as an evaluation drops what it finds
            self.scored = (groups, rewards, self._scorer.pop_figures())
        groups, rewards, _ = self.scored
        return groups, rewards

    def _draw(self) -> None:
        try:
            if super().run():
                self.result()
        except BaseException as error:  # of any kind: who waits must hear of it
            self._error = error


class BatchSource:
    """Give the loop its samples. take(), settle() and restore() are collective.

    While a draw is in flight, nothing else may ask the replicas or the scorer for anything:
    settle() first.
    """

    def __init__(
        self,
        engine: Engine,
        replicas: RunReplicas,
        scorer: Scorer,
        prompts: PromptSampler,
        *,
        timers: Timers,
        report: Report = no_report,
    ) -> None:
        """timers: of the loop's stages. report: told of replicas that stay slow."""
        self._adapter = engine.adapter
        self._config = engine.config
        self._mesh = engine.mesh
        self._replicas = replicas
        self._scorer = scorer
        self._prompts = prompts
        self._timers = timers
        self._samplings = step_samplings(engine.config, engine.adapter)
        self._is_ahead = engine.config.train.staleness > 0

        # The samples that the loop trains on, those that come next, and those in flight.
        self._current: StepSamples | None = None
        self._next: StepSamples | None = None
        self._draw: StepDraw | None = None
        # of draws in threads, which must not use the loop's
        self._draw_timers = Timers()
        # Version of the engine's weights, None where it is the one that draws.
        self._newest: int | None = None
        self._hidden_s = 0.0  # of the last draw, while other things were done
        self._replica_figures: Figures = {}  # of the last draw
        self._slow = SlowReplicas(report)
        self._position_before: dict[str, int | str] = {}  # the last batch of prompts

    def take(self, step: int) -> tuple[StepSamples, Figures]:
        """Return the samples of a step, and what is logged of the weights' way to the replicas.

        Then asks for those of the next step, if they are drawn ahead.
        Raises AgreedError when a replica or a reward fails.
        """
        figures: Figures = {}
        is_first = self._draw is None and self._next is None
        if is_first:
            figures = self._replicas.bring(step, self._timers)
            self._draw = self._new_draw(step, version=step, timers=self._timers)
        self._newest = step if self._is_ahead and not is_first else None
        samples = self._next or self._collect()
        if self._is_ahead:
            self._current = samples  # before it is no longer the next one, for writer()
        self._next = None

        if self._is_ahead and step + 1 < self._config.train.num_steps:
            if not is_first:
                # Weights change between calls, never inside one: all ranks have their samples.
                figures = self._replicas.bring(step, self._timers)
            self._draw = self._new_draw(step + 1, version=step, timers=self._draw_timers)
            if self._mesh.is_model_group_source:
                self._draw.start()
            self._newest = step + 1  # it is collected after the update
        else:
            # In no `finally`: after an error the other ranks may never come to this collective.
            with self._timers("room"):
                self._replicas.rest()
        if self._is_ahead:
            figures["rollout/staleness"] = self._staleness(samples)
            figures["time/hidden_s"] = self._hidden_s
            self._hidden_s = 0.0
        figures |= self._replica_figures
        self._replica_figures = {}

        return samples, figures

    def settle(self) -> None:
        """Wait for what is in flight, and keep it for its step.

        Raises AgreedError when a replica or a reward has failed.
        """
        if self._draw is not None:
            with self._timers("settle"):
                self._collect()

    def position(self) -> dict[str, int | str]:
        """Return the prompts' position behind the batch that is trained on.

        Prompts of a batch in flight count as not drawn: a resumed run draws them, with or without
        its samples.
        """
        has_next = self._draw is not None or self._next is not None
        return self._position_before if has_next else self._prompts.state()

    def writer(self, step: int) -> Callable[[Path], None] | None:
        """Return what writes this rank's samples of a step to come into a checkpoint's folder.

        None where there are none, or not yet. Not collective; the rescue's thread calls it as well.
        """
        if not self._is_ahead or not self._mesh.is_model_group_source:
            return None
        # In the order in which samples move on, so that none is missed on its way.
        draw = self._draw
        waiting = (self._samples(draw) if draw and draw.scored else None, self._next, self._current)

        for samples in waiting:
            if samples and samples.step == step:
                return partial(write_batch, samples=samples, mesh=self._mesh)
        return None

    def drop_incomplete(self, folder: Path, step: int) -> None:
        """Leave a rescue's checkpoint without samples where some ranks had none yet. On rank 0."""
        if not self._is_ahead or step >= self._config.train.num_steps:
            return
        if not drop_incomplete(folder, num_files=self._mesh.dp):
            logger.warning(
                "the samples of step %d were not all there: the run that goes on draws them with "
                "its own weights, none a step old",
                step + 1,
            )

    def restore(self, step: int, saved: StepSamples | None) -> None:
        """Go on with the samples that a checkpoint holds. Collective.

        saved: this rank's, None where it has none. Those of another config are dropped, and drawn
        again with the weights that the run has.
        """
        num_steps = self._config.train.num_steps
        if not self._is_ahead or not 0 < step < num_steps:
            return

        mesh = self._mesh
        requests = self._requests(step, version=step, batch=self._prompts.peek())
        problem = ""
        if mesh.is_model_group_source:
            problem = _problem(saved, requests, self._scorer)
        if any_rank(bool(problem), mesh.cpu_group):
            if mesh.rank == 0:
                logger.warning(
                    "samples of step %d are drawn with its own weights, none a step old: %s",
                    step + 1,
                    problem or "another rank has none",
                )
            return

        fetched = None
        if saved is not None:  # with the run's own prompts, which have all columns of their rows
            prompts = [request.prompt for request in requests]
            groups = [
                replace(group, prompt=prompt)
                for group, prompt in zip(saved.groups, prompts, strict=True)
            ]
            fetched = (groups, saved.rewards)
        groups, rewards = share(fetched, requests, mesh=mesh)
        self._position_before = self._prompts.state()
        next(self._prompts)
        self._next = StepSamples(
            step=step,
            identities=tuple(map(identity, requests)),
            groups=groups,
            rewards=rewards,
            figures=saved.figures if saved else (),
            scored_by=self._scorer.identity,
        )

    def _new_draw(self, step: int, *, version: int, timers: Timers) -> StepDraw:
        self._position_before = self._prompts.state()
        requests = self._requests(step, version=version, batch=next(self._prompts))
        return StepDraw(
            self._replicas.fleet, self._scorer, requests, adapter=self._adapter, timers=timers
        )

    def _requests(self, step: int, *, version: int, batch: PromptBatch) -> list[RolloutRequest]:
        return group_requests(
            batch,
            self._samplings[step % len(self._samplings)],
            group_size=self._config.algorithm.group_size,
            seed=self._config.seed,
            step=step,
            policy_version=version,
        )

    def _collect(self) -> StepSamples:
        """Wait for the draw that was begun; its samples are the next ones. Collective."""
        draw = self._draw
        assert draw is not None
        start_s = time.perf_counter()
        mesh = self._mesh
        here = mesh.is_model_group_source
        # The peers' GPUs hold replicas too, so their waiting is time of the rollout. Timer `sample`
        # ends when all ranks have their scores; `rollout` and `reward` are this rank's own in it.
        waiting = nullcontext() if here else self._timers("rollout")
        with self._timers("sample"), waiting:
            # Where all replicas are lost, those that come back get the weights that there are now.
            self._replicas.finish(draw, here=here, version=self._newest)
            fetched = agreed(draw.conclude, mesh.cpu_group, here=here)
        groups, rewards = share(fetched, draw.requests, mesh=mesh)
        waited_s = time.perf_counter() - start_s
        drawn_s = self._timers.take_over(self._draw_timers)
        self._hidden_s = max(0.0, drawn_s - waited_s)
        self._next = replace(self._samples(draw), groups=groups, rewards=rewards)
        self._replica_figures = self._work_of_replicas(draw)
        self._draw = None

        return self._next

    def _work_of_replicas(self, draw: StepDraw) -> Figures:
        """Return on rank 0 how busy the replicas were, {} elsewhere. Collective."""
        names = [client.name for client in self._replicas.fleet.replicas]
        # Rank 0 knows all separate replicas. Their names from every rank would be most of what is
        # sent: 480 names of 500 ranks are 6 MB. Colocated ones are known to their own node alone.
        is_known = self._config.rollout.mode == "separate"
        work_of_ranks = gather_json_at(
            draw.work(names=() if is_known else names),
            destination=0,
            group=self._mesh.cpu_group,
        )
        if work_of_ranks is None:
            return {}
        calls = calls_of_all(work_of_ranks, names=names)
        self._slow.note(calls)
        seconds = (work["seconds"] for work in work_of_ranks if work is not None)
        return replica_figures(calls, drawing_s=max(seconds, default=0.0))

    def _samples(self, draw: StepDraw) -> StepSamples:
        """Return what a draw got on this rank, which is nothing on ranks that do not ask."""
        groups, rewards, figures = draw.scored or ([], {}, None)
        return StepSamples(
            step=draw.requests[0].step,
            identities=tuple(map(identity, draw.requests)),
            groups=groups,
            rewards=rewards,
            figures=() if figures is None else (figures,),
            scored_by=self._scorer.identity,
        )

    def _staleness(self, samples: StepSamples) -> float:
        """Return by how many versions the weights that drew the samples are behind. Collective."""
        lags = [samples.step - group.policy_version for group in samples.groups]
        sums = {"lag": float(sum(lags)), "count": float(len(lags))}
        sums = all_reduce_sums(sums, self._mesh.cpu_group)
        return sums["lag"] / sums["count"]


def _problem(saved: StepSamples | None, requests: Sequence[RolloutRequest], scorer: Scorer) -> str:
    """Say why saved samples cannot be those of the requests; '' where they are."""
    if saved is None:
        return "the checkpoint holds no samples"
    if saved.identities != tuple(map(identity, requests)):
        return "those of the checkpoint are of other prompts, or sampled otherwise"
    names = saved.rewards.keys() - {TOTAL}
    if names != scorer.weights.keys():
        return (
            f"those of the checkpoint were scored by {', '.join(sorted(names))}, and the run has "
            f"{', '.join(sorted(scorer.weights))}"
        )
    if saved.scored_by and saved.scored_by != scorer.identity:
        return "a reward has another weight, other args or other prompts by now"

    return ""
