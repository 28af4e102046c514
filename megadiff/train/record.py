"""Record each step of a run: metrics, sample images, evaluations, the progress line."""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from megadiff.algorithms import Algorithm, build_algorithm
from megadiff.config.schema import Config
from megadiff.models.adapter import ModelAdapter
from megadiff.observe.device_memory import DeviceMemory
from megadiff.observe.metrics import format_number
from megadiff.observe.power import PowerMeter
from megadiff.observe.profile import StepProfile
from megadiff.observe.progress import ProgressBar
from megadiff.observe.samples import SampleRecord
from megadiff.observe.step_folders import is_due
from megadiff.observe.timers import Timers
from megadiff.observe.trackers import Trackers
from megadiff.observe.utilisation import IMAGES, peak_tflops, utilisation
from megadiff.parallel.collectives import AgreedError, agreed, all_reduce_max, all_reduce_sums
from megadiff.parallel.mesh import Mesh
from megadiff.rewards.score import TOTAL
from megadiff.train.rows import rows_per_group, train_sampling
from megadiff.train.sampling import Rewards
from megadiff.types import Figures, RolloutGroup

logger = logging.getLogger(__name__)
# saved when samples are due
SAMPLE_PROMPTS = 8
SAMPLES_PER_PROMPT = 2


@dataclass(kw_only=True, eq=False)
class Recorder:
    """Reduce figures over the ranks and hand them to the trackers of rank 0.

    start() and step() are collective.
    timers: of the loop's stages. profile: traces steps. memory, power: watch this rank's GPU
    meanwhile, None on CPU. is_new_folder: whether the run's folder has no figures yet.
    """

    trackers: Trackers
    progress_bar: ProgressBar | None
    config: Config
    mesh: Mesh
    evaluate: Callable[[int], Figures] | None
    timers: Timers
    profile: StepProfile
    memory: DeviceMemory | None = None
    power: PowerMeter | None = None
    is_new_folder: bool
    # the last one whose metrics this rank has written
    recorded_step: int = field(default=0, init=False)
    # what the last step's figures took, without samples and evaluation
    _record_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._peak_tflops = peak_tflops(self.mesh.device)
        config = self.config
        uses_fp8 = {"rollout": config.rollout.fp8, "train": config.engine.fp8 != "none"}
        self._in_fp8 = [stage for stage, uses in uses_fp8.items() if uses]

    def start(self, step: int) -> None:
        """Log the figures of the policy before its first step here, where the run evaluates.

        A resumed run, step > 0, has them, unless it goes on from another run's checkpoint.
        """
        if not self.evaluate or (step and not self.is_new_folder):
            return
        metrics = self._evaluated(step)
        agreed(
            lambda: self.trackers.log(step, metrics), self.mesh.cpu_group, here=self.mesh.rank == 0
        )

    def step(
        self,
        step: int,
        figures: Figures,
        samples: Callable[[], list[SampleRecord]] | None = None,
    ) -> None:
        """Log the finished step `step` (from 1), with the timers' seconds.

        figures: equal on every rank, but for seconds and for those that rank 0 alone has. samples:
        called where images are due.
        """
        start_s = time.perf_counter()
        metrics = {**figures, **self.timers.pop(), **self._memory(), **self._power()}
        metrics = utilisation(metrics, self._peak_tflops, in_fp8=self._in_fp8)
        num_samples = self.config.train.prompts_per_step * self.config.algorithm.group_size
        metrics["perf/samples_per_s"] = num_samples / metrics["time/step_s"]
        num_devices = count_devices(self.config, self.mesh)
        if num_devices:
            metrics["perf/device_s_per_sample"] = num_devices / metrics["perf/samples_per_s"]
        if self._record_s:
            metrics["time/record_s"] = self._record_s
        self._record_s = time.perf_counter() - start_s

        failure: AgreedError | None = None
        if self.evaluate and is_due(
            self.config.eval.every, step, num_steps=self.config.train.num_steps
        ):
            try:
                metrics |= self._evaluated(step)
            except AgreedError as error:
                # the step itself is finished, and its line must not be lost
                failure = error
            except SystemExit:
                # stopped meanwhile: other ranks may be gone, so nothing is agreed on
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

    def _power(self) -> Figures:
        """Return the mean watts of the GPUs that say them, since the last call."""
        if self.mesh.device.type != "cuda":
            return {}
        watts = self.power.pop() if self.power else 0.0
        sums = {"watts": watts, "count": float(watts > 0)}
        sums = all_reduce_sums(sums, self.mesh.cpu_group)
        return {"perf/power_w": sums["watts"] / sums["count"]} if sums["count"] else {}

    def _memory(self) -> Figures:
        """Return the fullest rank's peaks since the last call, without phases that none has seen.

        On CPU that is the process's resident set, over its whole life.
        """
        device = self.mesh.device
        if device.type == "cuda":
            peak_gib = torch.cuda.max_memory_allocated(device) / 2**30
            torch.cuda.reset_peak_memory_stats(device)
        else:
            # Linux counts it in KiB
            peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        peaks = {"memory/peak_gib": peak_gib} | (self.memory.pop() if self.memory else {})
        peaks = all_reduce_max(peaks, self.mesh.cpu_group)

        return {key: peak for key, peak in peaks.items() if peak}

    def _evaluated(self, step: int) -> Figures:
        start_s = time.monotonic()
        assert self.evaluate is not None, "both callers have asked"
        metrics = self.evaluate(step)
        summary = "  ".join(f"{key} {format_number(value)}" for key, value in metrics.items())
        seconds = time.monotonic() - start_s
        logger.info("evaluation at step %d, %.1f s: %s", step, seconds, summary)
        return metrics | {"time/evaluate_s": seconds}

    def _write(
        self, step: int, metrics: Figures, samples: Callable[[], list[SampleRecord]] | None
    ) -> None:
        start_s = time.perf_counter()
        self.trackers.log(step, metrics)
        if self.progress_bar:
            self.progress_bar.update(step, metrics)
        self._record_s += time.perf_counter() - start_s
        self.recorded_step = step
        every = self.config.sample_every
        is_first = step == 1
        if (
            samples
            and every
            and (is_first or is_due(every, step, num_steps=self.config.train.num_steps))
        ):
            self.trackers.images(step, samples())


def step_work(
    groups: list[RolloutGroup],
    trained: list[RolloutGroup],
    adapter: ModelAdapter,
    algorithm: Algorithm,
    *,
    config: Config,
    mesh: Mesh,
) -> Figures:
    """Return a step's TFLOP of one device, and latent tokens and images of all, for utilisation().

    Collective. Rollout is a forward for each step of a sample, one for all of a group while they
    are in one state (rollout.same_noise); training is a forward and a backward for each row.
    trained: of the groups those that the update computed, see update().
    Rollout's TFLOP are left out where all replicas were started elsewhere. Tokens are those that
    forwards take; guidance's second pass and texts do not count.
    """
    backward = 1 if config.lora.rank else 2  # frozen weights have no gradient of their own
    num_rows = rows_per_group(config, algorithm)
    sampling = train_sampling(config, algorithm)
    work = {"rollout": 0.0, "train": 0.0}
    counts = {"perf/tokens_rollout": 0.0, "perf/tokens_train": 0.0, IMAGES: 0.0}

    for group in groups:
        num_text_tokens = adapter.num_text_tokens(group.conditioning)
        forward = adapter.flops(group.sampling, num_text_tokens) / 1e12
        work["rollout"] += forward * group.num_forwards
        num_tokens, _ = adapter.latents_shape(group.sampling)
        counts["perf/tokens_rollout"] += num_tokens * group.num_forwards
        counts[IMAGES] += group.pixels_GFHWC.shape[0] * group.sampling.num_frames

    for group in trained:
        num_text_tokens = adapter.num_text_tokens(group.conditioning)
        forward = adapter.flops(replace(sampling, images=group.sampling.images), num_text_tokens)
        work["train"] += forward / 1e12 * num_rows * (1 + backward)
        num_tokens, _ = adapter.latents_shape(group.sampling)
        counts["perf/tokens_train"] += num_tokens * num_rows

    num_copies = mesh.sp * mesh.tp  # model-parallel peers have the same groups
    num_devices = {"rollout": mesh.world_size, "train": mesh.world_size}
    if config.rollout.mode == "separate":
        num_devices["rollout"] = config.rollout.num_replicas * config.rollout.tp

    sums = all_reduce_sums({**work, **counts}, mesh.cpu_group)
    figures = {name: sums[name] / num_copies for name in counts}

    for stage in work:
        if num_devices[stage]:  # 0: replicas that others started, on nobody knows how many
            figures[f"perf/tflop_{stage}"] = sums[stage] / num_copies / num_devices[stage]
    return figures


def count_devices(config: Config, mesh: Mesh) -> int:
    """Return the devices of trainer and replicas; 0 where nobody knows how many replicas there are.

    On a CPU a rank, and a separate replica's worker, counts as a device.
    """
    on_policy = build_algorithm(config.algorithm).on_policy
    if config.rollout.mode == "colocated" or not on_policy:
        return mesh.world_size
    num_workers = config.rollout.num_replicas * config.rollout.tp
    return mesh.world_size + num_workers if num_workers else 0


def used_bytes(device: torch.device) -> int:
    """Return the bytes of a GPU's memory that all processes use."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def sample_records(
    groups: list[RolloutGroup], rewards: Rewards, *, frames_per_s: int
) -> list[SampleRecord]:
    """Return the first samples of this rank's first groups, by prompt text.

    So the same prompts come again.
    """
    records = []
    # by text, since the order of prompts changes from step to step
    order = sorted(range(len(groups)), key=lambda index: groups[index].prompt.text)

    for index in order[:SAMPLE_PROMPTS]:
        group = groups[index]
        for row, sample_index in enumerate(group.sample_indices[:SAMPLES_PER_PROMPT]):
            scores = {name: float(value_PG[index, row]) for name, value_PG in rewards.items()}
            record = SampleRecord(
                pixels=group.pixels_GFHWC[row],
                caption=group.prompt.text,
                reward=scores.pop(TOTAL),
                rewards=scores,
                prompt_id=group.prompt.id,
                sample_index=sample_index,
                policy_version=group.policy_version,
                frames_per_s=frames_per_s,
                thought=group.thought,
            )
            records.append(record)

    return records
