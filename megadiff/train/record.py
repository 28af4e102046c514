"""What a run leaves behind of each step: metrics, sample images, evaluations, the progress line."""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Callable
from statistics import fmean

import torch

from megadiff.algorithms.advantage import ZERO_STD
from megadiff.config.schema import Config
from megadiff.observe import diversity
from megadiff.observe.device_memory import DeviceMemory
from megadiff.observe.metrics import format_number
from megadiff.observe.progress import ProgressBar
from megadiff.observe.samples import SampleRecord
from megadiff.observe.timers import Timers
from megadiff.observe.trackers import Trackers
from megadiff.parallel.collectives import AgreedError, agreed, all_reduce_max, all_reduce_sums
from megadiff.parallel.mesh import Mesh
from megadiff.train.sampling import Rewards
from megadiff.types import RolloutGroup

logger = logging.getLogger(__name__)
SAMPLE_PROMPTS, SAMPLES_PER_PROMPT = 8, 2  # saved when samples are due


class Recorder:
    """Reduces figures over the ranks and hands them to the trackers of rank 0. start() and step() are collective.

    timers: of the loop's stages. memory: what watches this rank's GPU meanwhile, None on CPU."""

    def __init__(
        self,
        trackers: Trackers,
        progress_bar: ProgressBar | None,
        config: Config,
        mesh: Mesh,
        evaluate: Callable[[int], dict[str, float]] | None = None,
        *,
        timers: Timers,
        memory: DeviceMemory | None = None,
    ) -> None:
        self.trackers, self.progress_bar, self.config, self.mesh = (
            trackers,
            progress_bar,
            config,
            mesh,
        )
        self.evaluate, self.timers, self.memory = evaluate, timers, memory
        self._recorded_step = 0

    def is_due(self, every: int, step: int) -> bool:
        """Every `every` steps (0: never), and at the end of the run."""
        return step == self.config.train.num_steps or bool(every and step % every == 0)

    def recorded_step(self) -> int:
        """Return the last step whose metrics this rank has written."""
        return self._recorded_step

    def start(self, step: int) -> None:
        """Before the first step of a run that evaluates: the figures of the untrained policy, as step 0. A resumed run,
        step > 0, has them."""
        if step or not self.evaluate:
            return
        metrics = self._evaluated(step)
        agreed(
            lambda: self.trackers.log(step, metrics), self.mesh.cpu_group, here=self.mesh.rank == 0
        )

    def step(
        self,
        step: int,
        figures: dict[str, float],
        samples: Callable[[], list[SampleRecord]] | None = None,
    ) -> None:
        """Log the finished step `step` (from 1), with the timers' seconds. figures: equal on every rank but for seconds.
        samples: called where images are due."""
        metrics = {**figures, **self.timers.pop(), **self._memory()}
        num_samples = self.config.train.prompts_per_step * self.config.algorithm.group_size
        metrics["perf/samples_per_s"] = num_samples / metrics["time/step_s"]
        failure: AgreedError | None = None
        if self.evaluate and self.is_due(self.config.eval.every, step):
            try:
                metrics |= self._evaluated(step)
            except (
                AgreedError
            ) as error:  # the step itself is finished, and its line must not be lost
                failure = error
            except (
                SystemExit
            ):  # stopped meanwhile: other ranks may be gone, so nothing is agreed on
                if self.mesh.rank == 0:
                    self._write(step, metrics, None)
                raise
        agreed(
            lambda: self._write(step, metrics, samples),
            self.mesh.cpu_group,
            here=self.mesh.rank == 0,
        )
        if failure:
            raise failure

    def _memory(self) -> dict[str, float]:
        """The fullest rank's; without phases that none has seen."""
        peaks = memory_metrics(self.mesh.device) | (self.memory.pop() if self.memory else {})
        return {
            key: peak for key, peak in all_reduce_max(peaks, self.mesh.cpu_group).items() if peak
        }

    def _evaluated(self, step: int) -> dict[str, float]:
        start_s = time.monotonic()
        metrics = self.evaluate(step)  # type: ignore[misc]  (both callers have asked)
        summary = "  ".join(f"{key} {format_number(value)}" for key, value in metrics.items())
        seconds = time.monotonic() - start_s
        logger.info("evaluation at step %d, %.1f s: %s", step, seconds, summary)
        return metrics | {"time/evaluate_s": seconds}

    def _write(
        self, step: int, metrics: dict[str, float], samples: Callable[[], list[SampleRecord]] | None
    ) -> None:
        self.trackers.log(step, metrics)
        self._recorded_step = step
        if samples and (step == 1 or self.is_due(self.config.sample_every, step)):
            self.trackers.images(step, samples())
        if self.progress_bar:
            self.progress_bar.update(step, metrics)


def rollout_metrics(
    groups: list[RolloutGroup], rewards: Rewards, *, step: int, mesh: Mesh
) -> dict[str, float]:
    """Rewards, diversity and staleness of what step `step` (from 1) sampled. Collective."""
    return {
        **reward_metrics(rewards, mesh),
        **diversity_metrics(groups, mesh),
        "rollout/staleness": float(step - 1 - min(group.policy_version for group in groups)),
    }


def reward_metrics(rewards: Rewards, mesh: Mesh) -> dict[str, float]:
    """Global mean of every reward; of the total also std, extremes' spread within groups, and the share without signal."""
    total_PG = rewards["total"].double()
    group_std_P = total_PG.std(dim=1, correction=0)
    sums = {
        f"reward/{name}": float(value.double().sum())
        for name, value in rewards.items()
        if name != "total"
    }
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
    per_group = {
        key: sums.pop(key) / groups for key in ("reward/group_std", "reward/zero_std_ratio")
    }
    means = {key: value / count for key, value in sums.items()}
    spread = max(squares / count - means["reward/mean"] ** 2, 0.0) ** 0.5
    return {**means, "reward/std": spread, **per_group}


def diversity_metrics(groups: list[RolloutGroup], mesh: Mesh) -> dict[str, float]:
    """Means over the groups of all ranks: how different the samples of one prompt are, and the looks of a hacked reward.
    Of a video, its middle frame, and how much it moves. Diversity of colour is that of prompts that name none, and missing
    without one."""
    keys = (
        "pixel_spread",
        "saturation",
        "clipped_share",
        "count",
        "colour_entropy_bit",
        "open_count",
        "motion",
    )
    sums = dict.fromkeys(keys, 0.0)
    for group in groups:
        pixels = torch.stack(
            [sample.pixels[len(sample.pixels) // 2] for sample in group.trajectories]
        )
        small = diversity.thumbnails(pixels)  # three of four figures look at these: shrunk once
        sums["pixel_spread"] += diversity.pixel_spread(small)
        sums["saturation"] += diversity.saturation(small)
        sums["clipped_share"] += diversity.clipped_share(pixels)
        sums["count"] += 1
        if not diversity.names_a_colour(group.prompt.text):
            sums["colour_entropy_bit"] += diversity.colour_entropy_bit([small])
            sums["open_count"] += 1
        if _has_videos(group):
            sums["motion"] += fmean(
                diversity.motion(sample.pixels) for sample in group.trajectories
            )
    sums = all_reduce_sums(sums, mesh.cpu_group)
    count, open_count, bits = (
        sums.pop("count"),
        sums.pop("open_count"),
        sums.pop("colour_entropy_bit"),
    )
    means = {name: value / count for name, value in sums.items()}
    means |= {"colour_entropy_bit": bits / open_count} if open_count else {}
    if not any(map(_has_videos, groups)):
        del means["motion"]
    return {f"diversity/{name}": value for name, value in means.items()}


def _has_videos(group: RolloutGroup) -> bool:
    return len(group.trajectories[0].pixels) > 1


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Peak memory of this rank since the last call: allocated on the GPU, or the process's resident set on CPU."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return {"memory/peak_gib": peak / 2**30}
    return {"memory/peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}


def used_bytes(device: torch.device) -> int:
    """Of a GPU's memory, by all processes."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def sample_records(
    groups: list[RolloutGroup], rewards: Rewards, *, frames_per_s: int
) -> list[SampleRecord]:
    """The first samples of this rank's first groups (by prompt text, so that the same prompts come again)."""
    order = sorted(range(len(groups)), key=lambda index: groups[index].prompt.text)[:SAMPLE_PROMPTS]
    return [
        SampleRecord(
            pixels=sample.pixels,
            caption=groups[index].prompt.text,
            rewards={
                name: float(value[index, place])
                for name, value in rewards.items()
                if name != "total"
            },
            reward=float(rewards["total"][index, place]),
            prompt_id=groups[index].prompt.id,
            sample_index=sample.sample_index,
            policy_version=sample.policy_version,
            frames_per_s=frames_per_s,
        )
        for index in order
        for place, sample in enumerate(groups[index].trajectories[:SAMPLES_PER_PROMPT])
    ]
