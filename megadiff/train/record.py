"""What a run leaves behind of each step: metrics, sample images, evaluations, the progress line."""

from __future__ import annotations

import logging
import resource
from collections.abc import Callable

import torch

from megadiff.algorithms.advantage import ZERO_STD
from megadiff.config.schema import Config
from megadiff.observe.progress import ProgressBar
from megadiff.observe.samples import SampleRecord
from megadiff.observe.trackers import Trackers
from megadiff.parallel.collectives import AgreedError, agreed, all_reduce_max, all_reduce_sums
from megadiff.parallel.mesh import Mesh
from megadiff.train.rollout import Rewards
from megadiff.types import RolloutGroup

logger = logging.getLogger(__name__)
SAMPLE_PROMPTS, SAMPLES_PER_PROMPT = 8, 2  # saved when samples are due


class Recorder:
    """Reduces figures over the ranks and hands them to the trackers of rank 0. step() is collective."""

    def __init__(
        self,
        trackers: Trackers,
        progress_bar: ProgressBar | None,
        config: Config,
        mesh: Mesh,
        evaluate: Callable[[int], dict[str, float]] | None = None,
    ) -> None:
        self.trackers, self.progress_bar, self.config, self.mesh = trackers, progress_bar, config, mesh
        self.evaluate = evaluate

    def is_due(self, every: int, step: int) -> bool:
        """Every `every` steps (0: never), and at the end of the run."""
        return step == self.config.train.num_steps or bool(every and step % every == 0)

    def step(self, step: int, groups: list[RolloutGroup], rewards: Rewards, figures: dict[str, float]) -> None:
        """Log the finished step `step` (from 1)."""
        metrics = {
            **reward_metrics(rewards, self.mesh),
            **figures,
            **all_reduce_max(memory_metrics(self.mesh.device), self.mesh.cpu_group),
            "rollout/staleness": float(step - 1 - min(group.policy_version for group in groups)),
        }
        num_samples = self.config.train.prompts_per_step * self.config.algorithm.group_size
        metrics["perf/samples_per_s"] = num_samples / metrics["time/step_s"]
        failure: AgreedError | None = None
        if self.evaluate and self.is_due(self.config.eval.every, step):
            try:
                metrics |= self.evaluate(step)
            except AgreedError as error:  # the step itself is finished, and its line must not be lost
                failure = error
        agreed(lambda: self._write(step, metrics, groups, rewards), self.mesh.cpu_group, here=self.mesh.rank == 0)
        if failure:
            raise failure

    def _write(self, step: int, metrics: dict[str, float], groups: list[RolloutGroup], rewards: Rewards) -> None:
        self.trackers.log(step, metrics)
        if step == 1 or self.is_due(self.config.sample_every, step):
            self.trackers.images(step, sample_records(groups, rewards))
        if self.progress_bar:
            self.progress_bar.update(step, metrics)


def reward_metrics(rewards: Rewards, mesh: Mesh) -> dict[str, float]:
    """Global mean of every reward; of the total also std, extremes' spread within groups, and the share without signal."""
    total_PG = rewards["total"].double()
    group_std_P = total_PG.std(dim=1, correction=0)
    sums = {f"reward/{name}": float(value.double().sum()) for name, value in rewards.items() if name != "total"}
    sums |= {
        "reward/mean": float(total_PG.sum()),
        "squares": float((total_PG**2).sum()),
        "count": float(total_PG.numel()),
        "groups": float(total_PG.shape[0]),
        "reward/group_std": float(group_std_P.sum()),
        "reward/zero_std_ratio": float((group_std_P <= ZERO_STD).sum()),
    }
    sums = all_reduce_sums(
        sums, mesh.cpu_group
    )  # model-parallel peers count alike: numerators and counts scale together
    squares, count, groups = sums.pop("squares"), sums.pop("count"), sums.pop("groups")
    per_group = {key: sums.pop(key) / groups for key in ("reward/group_std", "reward/zero_std_ratio")}
    means = {key: value / count for key, value in sums.items()}
    spread = max(squares / count - means["reward/mean"] ** 2, 0.0) ** 0.5
    return {**means, "reward/std": spread, **per_group}


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Peak memory of this rank since the last call: allocated on the GPU, or the process's resident set on CPU."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return {"memory/peak_gib": peak / 2**30}
    return {"memory/peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}


def sample_records(groups: list[RolloutGroup], rewards: Rewards) -> list[SampleRecord]:
    """The first samples of this rank's first groups (by prompt text, so that the same prompts come again)."""
    order = sorted(range(len(groups)), key=lambda index: groups[index].prompt.text)[:SAMPLE_PROMPTS]
    return [
        SampleRecord(
            pixels=sample.pixels,
            caption=groups[index].prompt.text,
            rewards={name: float(value[index, place]) for name, value in rewards.items() if name != "total"},
            reward=float(rewards["total"][index, place]),
            prompt_id=groups[index].prompt.id,
            sample_index=sample.sample_index,
            policy_version=sample.policy_version,
        )
        for index in order
        for place, sample in enumerate(groups[index].trajectories[:SAMPLES_PER_PROMPT])
    ]
