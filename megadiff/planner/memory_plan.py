"""Plan which layouts of a run fit on its GPUs, and which to take: bytes of every phase of a step.

Phases: rollout (replicas sample), sync (weights go to the replicas), log_probs (the trainer's
forwards without gradient: the parity gate, old and reference log_probs), update (forward,
backward, optimizer).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from math import prod

from megadiff.algorithms import REFERENCE, build_algorithm
from megadiff.config.load import ConfigError
from megadiff.config.schema import Config
from megadiff.config.validate import validate
from megadiff.models.adapter import ModelAdapter
from megadiff.parallel.mesh import Layout, resolve_layout
from megadiff.planner.activation_memory import activation_bytes
from megadiff.planner.engine_memory import (
    FLOAT32,
    ModelShape,
    Placing,
    Static,
    Work,
    gathered_bytes,
    static_bytes,
)
from megadiff.planner.footprint import Replicas, size_replicas
from megadiff.planner.work import Machine, model_shape, work_of
from megadiff.train.components import trained_components
from megadiff.types import DTYPES

PHASES = ("rollout", "sync", "log_probs", "update")
# of a process on a GPU: its CUDA context, kernels, NCCL; two take 3 to 4 GiB, measured on H200s
CONTEXT_BYTES = 3 << 29
# as torch reports them
USABLE_GIB = {"h200": 139.8, "b200": 178.4, "h100": 79.1, "a100": 79.1, "a100-40": 39.4}
BUDGETS = [step / 20 for step in range(1, 11)]  # above 0.5 nothing has been measured


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Hold the memory of one layout.

    offloads: whether optimizer state waits on the host between updates. static: None where it
    cannot be sharded. phases: phase → part → bytes on the fullest GPU. host: part → bytes of host
    memory a GPU. obstacle: why it cannot run at all, "" when it can.
    """

    placing: Placing
    work: Work
    offloads: bool
    static: Static | None
    phases: dict[str, dict[str, int]]
    host: dict[str, int]
    obstacle: str

    def peak(self, phase: str) -> int:
        return sum(self.phases[phase].values())

    @property
    def worst_phase(self) -> str:
        return max(self.phases, key=self.peak)

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())

    def fits(self, machine: Machine) -> bool:
        """Tell whether it runs, and a GPU's memory and its part of the host's suffice."""
        return (
            not self.obstacle
            and self.peak(self.worst_phase) <= machine.budget
            and self.host_bytes <= machine.host_budget
        )


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Hold the estimates of a config in the order of preference.

    text_tokens: of the longest prompt. pick: the first that fits. configured: the config's layout,
    None where it cannot run on this world.
    """

    config: Config
    text_tokens: int
    model: ModelShape
    machine: Machine
    replicas: Replicas
    estimates: list[Estimate]
    pick: Estimate | None
    configured: Estimate | None

    @property
    def nearest(self) -> list[Estimate]:
        """Return those that could run, by their peak: the first misses by the least."""
        possible = [estimate for estimate in self.estimates if not estimate.obstacle]
        return sorted(possible, key=lambda estimate: estimate.peak(estimate.worst_phase))


def make_plan(
    config: Config, adapter: ModelAdapter, *, machine: Machine, text_tokens: int
) -> MemoryPlan:
    """Estimate all layouts. text_tokens: of the longest prompt."""
    model = _trained_shape(config, adapter)
    replicas = size_replicas(config, model, machine, text_tokens=text_tokens)
    configured = _configured_placing(config, machine)
    # keys of a dict, as they keep their order: the config's may be among the others
    placings = dict.fromkeys(placings_of(machine))
    if configured:
        placings[configured] = None

    estimates = [
        estimate_placing(config, model, placing, replicas, machine, text_tokens=text_tokens)
        for placing in sorted(placings, key=lambda placing: _preference(placing, config, machine))
    ]

    return MemoryPlan(
        config=config,
        text_tokens=text_tokens,
        model=model,
        machine=machine,
        replicas=replicas,
        estimates=estimates,
        pick=next((estimate for estimate in estimates if estimate.fits(machine)), None),
        configured=next(
            (estimate for estimate in estimates if estimate.placing == configured), None
        ),
    )


def plan_configured(
    config: Config, adapter: ModelAdapter, *, machine: Machine, text_tokens: int
) -> Estimate | None:
    """Estimate the config's own layout alone, None where it cannot run on this world."""
    placing = _configured_placing(config, machine)
    if placing is None:
        return None
    model = _trained_shape(config, adapter)
    replicas = size_replicas(config, model, machine, text_tokens=text_tokens)
    return estimate_placing(config, model, placing, replicas, machine, text_tokens=text_tokens)


def _trained_shape(config: Config, adapter: ModelAdapter) -> ModelShape:
    num_components = len(adapter.components)
    num_trained = len(trained_components(config, adapter))
    return replace(
        model_shape(adapter, config.lora),
        num_components=num_components,
        # under LoRA every component has adapters
        num_frozen=0 if config.lora.rank else num_components - num_trained,
    )


def placings_of(machine: Machine) -> Iterator[Placing]:
    """Yield all that make sense: sp·tp within a node, copies of a sharded model one a node."""
    world = machine.world_size
    node = min(world, machine.gpus_per_node)

    for peers in _divisors(node):
        for tp in _divisors(peers):
            sizes = dict(world_size=world, dp=world // peers, sp=peers // tp, tp=tp)
            # VeOmni has no tensor parallelism. Keys of a dict: on one node both are 1.
            for dp_replicate in {1: None, world // node: None} if tp == 1 else ():
                yield Placing(backend="veomni", layout=Layout(dp_replicate=dp_replicate, **sizes))

            for sequence_parallel in (True, False) if tp > 1 else (False,):
                layout = Layout(dp_replicate=1, **sizes)
                yield Placing(
                    backend="megatron", layout=layout, sequence_parallel=sequence_parallel
                )


def _preference(placing: Placing, config: Config, machine: Machine) -> tuple[int, ...]:
    """Return a key that sorts the better layout first.

    Data parallelism comes first: its communication runs beside the computation. Ulysses moves heads
    and tensor parallelism tokens inside every block, while the block waits.
    """
    layout = placing.layout
    spans_nodes = placing.backend == "veomni" and placing.shards > machine.gpus_per_node

    return (
        layout.tp,
        layout.sp,
        spans_nodes,
        placing.backend != config.engine.backend,
        not placing.sequence_parallel,
        layout.dp_replicate,
    )


def estimate_placing(
    config: Config,
    model: ModelShape,
    placing: Placing,
    replicas: Replicas,
    machine: Machine,
    *,
    text_tokens: int,
) -> Estimate:
    """Estimate a layout, with its optimizer state on the host where engine.offload wants that.

    auto wants it of idle components, and of all where replicas would not fit beside it.
    """
    work = work_of(config, model, placing, machine, text_tokens)
    offload = config.engine.offload
    offloads = offload == "always" or (offload == "auto" and model.num_components > 1)
    estimate = _estimate_one(config, model, placing, work, replicas, offloads=offloads)
    if offload != "auto" or offloads or not replicas.per_gpu or estimate.fits(machine):
        return estimate

    offloaded = _estimate_one(config, model, placing, work, replicas, offloads=True)
    # Else it is the update that is too large, or the host too small.
    smaller = offloaded.phases and offloaded.host_bytes <= machine.host_budget
    return offloaded if smaller else estimate


def _estimate_one(
    config: Config,
    model: ModelShape,
    placing: Placing,
    work: Work,
    replicas: Replicas,
    *,
    offloads: bool,
) -> Estimate:
    try:
        static = static_bytes(model, placing, work, offloads=offloads)
        obstacle = _obstacle(config, model, placing)
    except ValueError as error:  # a size that tp does not divide
        return Estimate(
            placing=placing,
            work=work,
            offloads=offloads,
            static=None,
            phases={},
            host={},
            obstacle=str(error),
        )

    needs = build_algorithm(config.algorithm).needs
    host = {"reference": static.reference if REFERENCE in needs else 0}
    if config.algorithm.lagging_decay:
        host["lagging policy"] = static.masters
    if offloads:
        num_updated = model.num_components - model.num_frozen
        host["offloaded optimizer"] = num_updated * (static.optimizer + static.average)
    host["sleeping replica"] = replicas.parked * replicas.per_gpu

    return Estimate(
        placing=placing,
        work=work,
        offloads=offloads,
        static=static,
        phases=_phases(config, model, placing, work, static, replicas, offloads=offloads),
        host=host,
        obstacle=obstacle,
    )


def largest_budget(plan: MemoryPlan, estimate: Estimate) -> tuple[float, int]:
    """Return the largest of BUDGETS whose update still fits, and that update's bytes.

    It is the estimate's own budget where no larger one fits, or none keeps more.
    """
    others = estimate.peak("update") - estimate.phases["update"]["activations"]
    largest = estimate.work.budget
    largest_peak = estimate.peak("update")

    for budget in BUDGETS:
        work = replace(estimate.work, budget=budget)
        peak = others + activation_bytes(plan.model, estimate.placing, work, training=True)
        if budget > largest and largest_peak < peak <= plan.machine.budget:
            largest = budget
            largest_peak = peak

    return largest, largest_peak


def _phases(
    config: Config,
    model: ModelShape,
    placing: Placing,
    work: Work,
    static: Static,
    replicas: Replicas,
    *,
    offloads: bool,
) -> dict[str, dict[str, int]]:
    """Return those of PHASES that a run has → part → bytes on the fullest GPU."""
    resident = {
        "parameters": static.parameters,
        "optimizer": static.optimizer,
        "average": static.average,
        "contexts": CONTEXT_BYTES * (1 + replicas.per_gpu),
    }
    if model.num_constants:
        num_copies = model.num_components * (1 + replicas.per_gpu)
        resident["constants"] = FLOAT32 * model.num_constants * num_copies
    # on the host outside of updates, of an idle component within them too
    resting = resident | {"optimizer": 0, "average": 0} if offloads else resident
    # a shared base is among the trainer's parameters
    weights = replicas.beside_base if work.shares_base else replicas.weights
    pushed = replicas.beside_base if work.shares_base else replicas.pushed
    awake = {"replica": weights * replicas.per_gpu}
    asleep = {"replica": 0} if replicas.sleeps else awake
    on_policy = build_algorithm(config.algorithm).on_policy

    def passes(*, training: bool) -> dict[str, int]:
        return {
            "gathered": gathered_bytes(model, placing, work, training=training),
            "activations": activation_bytes(model, placing, work, training=training),
        }

    phases = {"update": resident | {"gradients": static.gradients} | asleep | passes(training=True)}
    if on_policy:
        phases["log_probs"] = resting | asleep | passes(training=False)
        if config.parity.mode != "off":
            # for the gate rank 0 encodes a prompt while replicas sleep; later they are awake
            encoding = resting | asleep | {"text encoder": replicas.encoder}
            forward = resting | awake | passes(training=False)
            phases["log_probs"] = max(encoding, forward, key=lambda parts: sum(parts.values()))

    if on_policy or config.eval.every:
        working = {"replica at work": replicas.working * replicas.per_gpu}
        phases["rollout"] = resting | awake | working
        landing = {"replica": pushed * replicas.per_gpu}
        sent = model.lora if work.shares_base else model.shapes
        largest = max(map(prod, sent.values())) * DTYPES[config.model.dtype].itemsize
        bucket = max(config.sync.bucket_mib * 2**20, largest)
        # The bucket that is sent and the next one; the largest tensor, which is gathered on one
        # side and read on the other.
        phases["sync"] = resting | landing | {"buckets": 2 * bucket + 2 * largest}

    return phases


def _obstacle(config: Config, model: ModelShape, placing: Placing) -> str:
    """Return why training would refuse the layout, "" when it would not."""
    layout = placing.layout
    num_heads = model.adapter.num_heads
    if num_heads % (layout.sp * layout.tp):
        return f"sp*tp = {layout.sp * layout.tp} does not divide the model's {num_heads} heads"

    sizes = asdict(layout)
    del sizes["world_size"]  # is no key of the config
    asked = replace(
        config,
        engine=replace(config.engine, backend=placing.backend),
        parallel=replace(config.parallel, **sizes),
    )

    try:
        validate(asked, dp=layout.dp, on_policy=build_algorithm(asked.algorithm).on_policy)
    except ConfigError as error:
        return str(error)

    return ""


def _configured_placing(config: Config, machine: Machine) -> Placing | None:
    parallel = config.parallel
    try:
        layout = resolve_layout(
            dp=parallel.dp,
            sp=parallel.sp,
            tp=parallel.tp,
            dp_replicate=parallel.dp_replicate,
            world_size=machine.world_size,
        )
    except ValueError:  # written for another world
        return None

    return Placing(
        backend=config.engine.backend,
        layout=layout,
        sequence_parallel=layout.tp > 1 and parallel.sequence_parallel,
    )


def _divisors(value: int) -> list[int]:
    return [candidate for candidate in range(1, value + 1) if value % candidate == 0]
