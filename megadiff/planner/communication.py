"""Put a step's communication beside its computation, and find where more nodes stop to pay.

Seconds are those of links and GPUs that were measured (docs/performance.md); bytes are counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megadiff.algorithms import OLD, build_algorithm
from megadiff.config.schema import Config
from megadiff.config.validate import sleeps
from megadiff.models.adapter import ModelAdapter
from megadiff.observe.utilisation import PEAK_TFLOPS
from megadiff.parallel.mesh import Layout
from megadiff.planner.engine_memory import Placing, Work
from megadiff.planner.memory_plan import MemoryPlan
from megadiff.planner.network import (
    PURPOSES,
    Links,
    StepPasses,
    Traffic,
    link_seconds,
    push_traffic,
    step_traffic,
)
from megadiff.planner.work import Machine, work_of
from megadiff.train.components import forwards_per_sample
from megadiff.train.rows import rows_per_group, train_sampling
from megadiff.train.sampling import sampling_of
from megadiff.types import DTYPES, Sampling

GB = 1e9
NVLINK_GBS = 332.0  # a GPU: NCCL's all-gather on 4 H200s, docs/performance.md
NETWORK_GBS_PER_GPU = 50.0  # the line rate of 400 Gb/s, one NDR InfiniBand port a GPU
MOST_NODES = 1024
MOST_WAITING = 0.5  # of the seconds of computation, where more nodes stop to pay

# TFLOP/s of the model's own operations that whole steps reach on H200s, all compiled: "Whole steps"
# in docs/performance.md, of 761 TFLOP/s. With LoRA: rank 64. FP8 in the trainer is not counted, nor
# is the trainer's forward for old log_probs, which FP8 replicas make necessary.
REACHED_ON = "NVIDIA H200"
REACHED_TFLOPS = {"rollout": 0.68 * 761, "rollout in FP8": 0.92 * 761, "train": 0.51 * 761}
REACHED_TFLOPS_LORA = {"rollout": 0.60 * 761, "rollout in FP8": 1.05 * 761, "train": 0.34 * 761}


@dataclass(frozen=True, kw_only=True)
class Communication:
    """Hold a layout's traffic in a step, and the seconds of it.

    train_s, rollout_s: of computation on the trainer's GPUs.
    """

    traffic: Sequence[Traffic]
    links: Links
    train_s: float
    rollout_s: float

    @property
    def compute_s(self) -> float:
        return self.train_s + self.rollout_s

    @property
    def hidden_s(self) -> float:
        """Seconds of links while GPUs compute; training hides no more than it takes."""
        return min(self.train_s, link_seconds(self.traffic, self.links, is_hidden=True))

    @property
    def waiting_s(self) -> float:
        """Seconds in which GPUs wait for links: what nothing hides, or too little does."""
        beside_s = link_seconds(self.traffic, self.links, is_hidden=True)
        blocking_s = link_seconds(self.traffic, self.links, is_hidden=False)
        return blocking_s + beside_s - self.hidden_s

    @property
    def is_bound(self) -> bool:
        """Tell whether GPUs wait for links too long."""
        return self.waiting_s > MOST_WAITING * self.compute_s

    @property
    def network_bytes(self) -> float:
        """Bytes that leave a node in a step."""
        return sum(row.network_bytes(self.links.gpus_per_node) for row in self.traffic)

    def sent(self, purpose: str) -> float:
        """Return the bytes that one GPU sends."""
        return sum(row.sent for row in self.traffic if row.purpose == purpose)

    def to_json(self) -> dict[str, object]:
        return {
            "sent": {purpose: self.sent(purpose) for purpose in PURPOSES},
            "network": self.network_bytes,
            "train_s": self.train_s,
            "rollout_s": self.rollout_s,
            "hidden_s": self.hidden_s,
            "waiting_s": self.waiting_s,
        }


@dataclass(frozen=True, kw_only=True)
class Network:
    """Estimate the communication of a plan's layouts.

    gpu: a key of memory_plan.USABLE_GIB.
    """

    plan: MemoryPlan
    links: Links
    gpu: str

    def of(self, placing: Placing, work: Work) -> Communication:
        """Return a layout's communication."""
        config = self.plan.config
        model = self.plan.model
        is_separate = config.rollout.mode == "separate"
        traffic = step_traffic(model, placing, work, self._passes(work))
        traffic += push_traffic(
            placing,
            pushed_bytes=self._pushed_bytes(work),
            links=self.links,
            is_separate=is_separate,
        )

        tflop = step_tflop(config, model.adapter, self.plan.text_tokens)
        reached = REACHED_TFLOPS_LORA if config.lora.rank else REACHED_TFLOPS
        rollout_tflops = reached["rollout in FP8" if config.rollout.fp8 else "rollout"]
        name = f"NVIDIA {self.gpu.partition('-')[0].upper()}"
        # as far as other GPUs reach the same part of their peak
        speed = PEAK_TFLOPS[name] / PEAK_TFLOPS[REACHED_ON] * placing.layout.world_size
        return Communication(
            traffic=traffic,
            links=self.links,
            train_s=tflop["train"] / reached["train"] / speed,
            rollout_s=0.0 if is_separate else tflop["rollout"] / rollout_tflops / speed,
        )

    def limit(self, placing: Placing) -> tuple[int, str]:
        """Return the most nodes, of powers of two, that a layout pays on, and what stops it."""
        plan = self.plan
        num_nodes = 1
        # doubled, as dp has to divide the prompts of a step, which are mostly powers of two
        while num_nodes < MOST_NODES:
            more = 2 * num_nodes
            grown = self.on_nodes(placing, more)
            prompts = plan.config.train.prompts_per_step
            if prompts % grown.layout.dp:
                reason = f"dp={grown.layout.dp} does not divide train.prompts_per_step={prompts}"
                return num_nodes, reason

            machine = replace(plan.machine, world_size=grown.layout.world_size)
            work = work_of(plan.config, plan.model, grown, machine, plan.text_tokens)
            communication = self.of(grown, work)
            if communication.is_bound:
                return num_nodes, (
                    f"GPUs would wait {communication.waiting_s:.1f} s for links, beside "
                    f"{communication.compute_s:.1f} s of computation"
                )
            num_nodes = more
        return num_nodes, "nothing up to there"

    def on_nodes(self, placing: Placing, num_nodes: int) -> Placing:
        """Return the layout with the same peers on so many whole nodes.

        Shards stay within a node where they are; else they spread over all.
        """
        gpus_per_node = self.links.gpus_per_node
        world_size = num_nodes * gpus_per_node
        peers = placing.layout.sp * placing.layout.tp
        dp = world_size // peers
        spreads = placing.backend != "veomni" or placing.shards > gpus_per_node
        layout = Layout(
            world_size=world_size,
            dp=dp,
            dp_replicate=1 if spreads else num_nodes,
            sp=placing.layout.sp,
            tp=placing.layout.tp,
        )
        return replace(placing, layout=layout)

    def _passes(self, work: Work) -> StepPasses:
        """Count passes; microbatches are dealt to the components evenly."""
        config = self.plan.config
        algorithm = config.algorithm
        components = self.plan.model.num_components - self.plan.model.num_frozen
        microbatches = math.ceil(work.num_microbatches / components)
        updates = config.train.updates_per_step

        # The first update's forwards give its old log_probs (train/update.py). "auto" counts as if
        # they were computed.
        recomputed = updates - 1 if algorithm.old_log_prob != "rollout" else 0
        needs = build_algorithm(algorithm).needs
        if OLD in needs:
            recomputed = updates - 1
        recomputed += updates * len(needs - {OLD})
        return StepPasses(
            components=components,
            updates=updates,
            microbatches=microbatches,
            forwards=recomputed * microbatches,
        )

    def _pushed_bytes(self, work: Work) -> int:
        """Return the bytes of a step's push: what was trained, or all to replicas that slept."""
        config = self.plan.config
        model = self.plan.model
        if not build_algorithm(config.algorithm).on_policy:
            return 0
        num_lora = sum(map(math.prod, model.lora.values()))
        elements = (model.num_components - model.num_frozen) * (num_lora or model.num_parameters)
        # a shared base is never sent
        if sleeps(config, device_type="cuda") and not work.shares_base:
            elements = model.num_components * (num_lora + model.num_parameters)
        return DTYPES[config.model.dtype].itemsize * elements


def step_tflop(config: Config, adapter: ModelAdapter, text_tokens: int) -> dict[str, float]:
    """Return the model's own TFLOP of a step on all GPUs, as perf/tflops_* count them."""
    algorithm = build_algorithm(config.algorithm)
    num_prompts = config.train.prompts_per_step

    def forward(sampling: Sampling) -> float:
        return num_prompts * adapter.flops(sampling, text_tokens) / 1e12

    drawn = sampling_of(config.rollout)
    num_steps = config.algorithm.group_size * forwards_per_sample(config, adapter)
    # frozen weights have no gradient of their own
    backward = 1 if config.lora.rank else 2
    rows = rows_per_group(config, algorithm)
    return {
        "rollout": forward(drawn) * num_steps if algorithm.on_policy else 0.0,
        "train": forward(train_sampling(config, algorithm)) * rows * (1 + backward),
    }


def default_links(machine: Machine, network_gbs: float | None) -> Links:
    """Return measured links within a node, and the given network or its line rate."""
    gbs = network_gbs or NETWORK_GBS_PER_GPU * machine.gpus_per_node
    return Links(gpus_per_node=machine.gpus_per_node, nvlink=NVLINK_GBS * GB, network=gbs * GB)
