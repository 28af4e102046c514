"""Which layouts of a run fit on its GPUs, and which of them to take: bytes per GPU in every phase of a step.

Phases: rollout (replicas sample), sync (weights go to the replicas), log_probs (the trainer's forwards without gradient:
the parity gate, old and reference log_probs), update (forward, backward, optimizer).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from megadiff.algorithms import build_algorithm
from megadiff.config.load import ConfigError
from megadiff.config.schema import Config, LoraConfig
from megadiff.config.validate import sleeps, validate
from megadiff.engines.veomni import UNSHARDED_SHARE, unsharded_bytes
from megadiff.models.adapter import ModelAdapter
from megadiff.parallel.lora import lora_shapes, lora_spec
from megadiff.parallel.mesh import Layout, resolve_layout
from megadiff.planner.engine_memory import (
    FLOAT32,
    ModelShape,
    Placing,
    Static,
    Work,
    activation_bytes,
    gathered_bytes,
    static_bytes,
)
from megadiff.planner.footprint import replica_weights
from megadiff.rollout.worker.fp8 import fp8_targets
from megadiff.train.components import trained_components
from megadiff.train.sampling import sampling_of, sft_sampling
from megadiff.types import DTYPES, Sampling

PHASES = ("rollout", "sync", "log_probs", "update")
CONTEXT_BYTES = (
    3 << 29
)  # of a process on a GPU: its CUDA context, kernels, NCCL: 3 to 4 GiB of two, measured on H200s
USABLE_GIB = {
    "h200": 139.8,
    "b200": 178.4,
    "h100": 79.1,
    "a100": 79.1,
    "a100-40": 39.4,
}  # as torch reports them


@dataclass(frozen=True, kw_only=True)
class Machine:
    """num_bytes: of one GPU. headroom: share of it kept free for fragmentation and what is not counted."""

    world_size: int
    gpus_per_node: int
    num_bytes: int
    headroom: float

    @property
    def budget(self) -> int:
        return int(self.num_bytes * (1 - self.headroom))


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """Of one worker of a replica, which has rollout.tp of them. weights: their bytes while it samples; pushed: while a push
    lands. sleeps: whether it frees them while the trainer works; parked: of these, what then waits in host memory. encoder:
    of the text encoder that the trainer loads for the parity gate. working: beside the weights while it samples. per_gpu:
    workers on the fullest GPU of the trainer. unknown: components that could not be sized."""

    weights: int
    pushed: int
    parked: int
    encoder: int
    working: int
    per_gpu: int
    sleeps: bool
    unknown: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """One layout. static: None where it cannot be sharded. phases: phase → part → bytes on the fullest GPU. host: part →
    bytes of host memory a GPU. obstacle: why it cannot run at all, "" when it can."""

    placing: Placing
    work: Work
    static: Static | None
    phases: dict[str, dict[str, int]]
    host: dict[str, int]
    obstacle: str

    def peak(self, phase: str) -> int:
        return sum(self.phases[phase].values())

    @property
    def worst_phase(self) -> str:
        return max(self.phases, key=self.peak)

    def fits(self, machine: Machine) -> bool:
        return not self.obstacle and self.peak(self.worst_phase) <= machine.budget


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """estimates: in the order of preference. pick: the first that fits. own: what the config itself asks for, None where
    it cannot run on this world."""

    model: ModelShape
    machine: Machine
    replicas: Replicas
    estimates: list[Estimate]
    pick: Estimate | None
    own: Estimate | None


def make_plan(
    config: Config, adapter: ModelAdapter, *, machine: Machine, text_tokens: int
) -> MemoryPlan:
    """text_tokens: of the longest prompt. Raises ValueError for colocated replicas on several nodes."""
    _check_placement(config, machine)
    several = len(adapter.components) > 1
    model = replace(
        model_shape(adapter, config.lora),
        num_components=len(adapter.components),
        num_frozen=0
        if config.lora.rank
        else len(adapter.components) - len(trained_components(config, adapter)),
        idle_offloaded=several and config.engine.offload_idle,
    )
    replicas = _replicas(config, adapter, model, machine, text_tokens)
    own = _own_placing(config, machine)
    placings = {placing: None for placing in [*placings_of(machine), *([own] if own else [])]}
    ordered = sorted(placings, key=lambda placing: _preference(placing, config, machine))
    estimates = [
        _estimate(config, adapter, model, placing, machine, replicas, text_tokens=text_tokens)
        for placing in ordered
    ]
    return MemoryPlan(
        model=model,
        machine=machine,
        replicas=replicas,
        estimates=estimates,
        pick=next((estimate for estimate in estimates if estimate.fits(machine)), None),
        own=next((estimate for estimate in estimates if estimate.placing == own), None),
    )


def model_shape(adapter: ModelAdapter, lora: LoraConfig) -> ModelShape:
    """Of the stock transformer, built without memory, with the low-rank tensors that the config asks for."""
    shapes = {name: tuple(p.shape) for name, p in adapter.empty_transformer().named_parameters()}
    pairs = lora_shapes(lora_spec(lora, adapter.plan, shapes), shapes)
    return ModelShape(
        shapes=shapes,
        plan=adapter.plan,
        width=adapter.width,
        num_heads=adapter.num_heads,
        mlp_ratio=adapter.mlp_ratio,
        activations=adapter.activations,
        lora=pairs,
    )


def placings_of(machine: Machine) -> Iterator[Placing]:
    """All that make sense: sp·tp within a node, and copies of the sharded model only where each of them is a node."""
    world, node = machine.world_size, min(machine.world_size, machine.gpus_per_node)
    for peers in _divisors(node):
        for tp in _divisors(peers):
            sizes = dict(world_size=world, dp=world // peers, sp=peers // tp, tp=tp)
            for dp_replicate in {1: None, world // node: None} if tp == 1 else ():
                yield Placing(backend="veomni", layout=Layout(dp_replicate=dp_replicate, **sizes))
            for sequence_parallel in (True, False) if tp > 1 else (False,):
                layout = Layout(dp_replicate=1, **sizes)
                yield Placing(
                    backend="megatron", layout=layout, sequence_parallel=sequence_parallel
                )


def _preference(placing: Placing, config: Config, machine: Machine) -> tuple:
    """Data parallelism first: its communication runs beside the computation; Ulysses moves heads and tensor parallelism
    tokens inside every block, while the block waits. Then what gathers within a node, then the config's own engine."""
    layout = placing.layout
    spans_nodes = placing.backend == "veomni" and placing.shards > machine.gpus_per_node
    return (
        layout.tp, layout.sp, spans_nodes, placing.backend != config.engine.backend, not placing.sequence_parallel,
        layout.dp_replicate,
    )  # fmt: skip


def _estimate(
    config: Config,
    adapter: ModelAdapter,
    model: ModelShape,
    placing: Placing,
    machine: Machine,
    replicas: Replicas,
    *,
    text_tokens: int,
) -> Estimate:
    work = work_of(config, adapter, placing, model, machine, text_tokens)
    try:
        static = static_bytes(model, placing, work)
        obstacle = _obstacle(config, model, placing)
    except ValueError as error:  # a size that tp does not divide
        return Estimate(
            placing=placing, work=work, static=None, phases={}, host={}, obstacle=str(error)
        )
    phases = _phases(config, model, placing, work, static, replicas)
    host = {
        "reference": static.reference if build_algorithm(config.algorithm).needs_reference else 0
    }
    if model.idle_offloaded:
        host["idle optimizer"] = (model.num_components - model.num_frozen) * static.optimizer
    host["sleeping replica"] = replicas.parked * replicas.per_gpu
    return Estimate(
        placing=placing, work=work, static=static, phases=phases, host=host, obstacle=obstacle
    )


def largest_budget(plan: MemoryPlan, estimate: Estimate) -> tuple[float, int]:
    """Of the budgets above the estimate's own, in steps of 0.05 up to 0.5 (beyond it nothing has been measured), the largest
    with which its update still fits; that update's bytes. The estimate's own where none does."""
    others = estimate.peak("update") - estimate.phases["update"]["activations"]
    best = estimate.work.budget, estimate.peak("update")
    for budget in (step / 20 for step in range(1, 11)):
        work = replace(estimate.work, budget=budget)
        peak = others + activation_bytes(plan.model, estimate.placing, work, training=True)
        if budget > best[0] and peak <= plan.machine.budget:
            best = budget, peak
    return best


def _phases(
    config: Config,
    model: ModelShape,
    placing: Placing,
    work: Work,
    static: Static,
    replicas: Replicas,
) -> dict[str, dict[str, int]]:
    """Those of PHASES that a run has → part → bytes on the fullest GPU."""
    resident = {
        "parameters": static.parameters,
        "optimizer": static.optimizer,
        "average": static.average,
    }
    resident["contexts"] = CONTEXT_BYTES * (1 + replicas.per_gpu)
    resting = resident | {"optimizer": 0} if model.idle_offloaded else resident
    awake = {"replica": replicas.weights * replicas.per_gpu}
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
        if (
            config.parity.mode != "off"
        ):  # the gate: rank 0 encodes a prompt while replicas sleep, later they are awake
            encoding = resting | asleep | {"text encoder": replicas.encoder}
            forward = resting | awake | passes(training=False)
            phases["log_probs"] = max(encoding, forward, key=lambda parts: sum(parts.values()))
    if on_policy or config.eval.every:
        phases["rollout"] = (
            resting | awake | {"replica at work": replicas.working * replicas.per_gpu}
        )
        landing = {"replica": replicas.pushed * replicas.per_gpu}
        phases["sync"] = resting | landing | {"buckets": _bucket_bytes(config, model)}
    return phases


def work_of(
    config: Config,
    adapter: ModelAdapter,
    placing: Placing,
    model: ModelShape,
    machine: Machine,
    text_tokens: int,
) -> Work:
    """The longest microbatch of an update on one rank."""
    on_policy = build_algorithm(config.algorithm).on_policy
    sampling = sampling_of(config.rollout) if on_policy else sft_sampling(config.rollout)
    samples = (
        config.train.prompts_per_step
        * config.algorithm.group_size
        // placing.layout.dp
        // config.train.updates_per_step
    )
    rows = max(1, samples * (sampling.sde_window_size if on_policy else 1))
    num_microbatches = math.ceil(rows / config.train.microbatch_size)
    itemsize = DTYPES[config.engine.dtype].itemsize
    unsharded = unsharded_bytes(  # VeOmni's way; Megatron's buffers are always whole
        num_elements=model.num_parameters, num_trained=model.num_trained, itemsize=itemsize
    )
    tokens = adapter.token_count(sampling, text_tokens)
    return Work(
        rows=min(config.train.microbatch_size, rows),
        image_tokens=tokens.image,
        text_tokens=tokens.text,
        modulates_tokens=tokens.is_modulated,
        passes=_num_passes(adapter, sampling),
        itemsize=itemsize,
        stream_itemsize=_stream_itemsize(config, config.engine.dtype),
        budget=config.engine.activation_memory_budget,
        num_microbatches=num_microbatches,
        accumulates=num_microbatches > 1 and unsharded <= UNSHARDED_SHARE * machine.num_bytes,
        keeps_average=config.algorithm.ema_decay > 0,
        compiled=config.engine.compile,
    )


def _stream_itemsize(config: Config, dtype: str) -> int:
    return DTYPES["float32" if config.model.float32_streams else dtype].itemsize


def _num_passes(adapter: ModelAdapter, sampling: Sampling) -> int:
    return max(adapter.num_passes(each, sampling) for each in adapter.components)


def _replicas(
    config: Config, adapter: ModelAdapter, model: ModelShape, machine: Machine, text_tokens: int
) -> Replicas:
    """Nothing on the trainer's GPUs when they are elsewhere, or when nothing samples."""
    rollout, algorithm, dtype = config.rollout, config.algorithm, config.model.dtype
    found = replica_weights(Path(config.model.path), dtype=dtype, tp=rollout.tp)
    is_asleep = sleeps(config, device_type="cuda")
    samples_here = build_algorithm(algorithm).on_policy or config.eval.every
    if rollout.mode == "separate" or not samples_here:
        return Replicas(
            weights=0,
            pushed=0,
            parked=0,
            encoder=found.encoder,
            working=0,
            per_gpu=0,
            sleeps=False,
            unknown=(),
        )
    rows = max(
        algorithm.group_size, rollout.batch_size // algorithm.group_size * algorithm.group_size
    )
    alone = Placing(backend="veomni", layout=Layout(world_size=1, dp=1, dp_replicate=1, sp=1, tp=1))
    tokens = adapter.token_count(sampling_of(rollout), text_tokens)
    work = replace(
        work_of(config, adapter, alone, model, machine, text_tokens),
        rows=rows,
        image_tokens=tokens.image,
        modulates_tokens=tokens.is_modulated,
        passes=_num_passes(adapter, sampling_of(rollout)),
        itemsize=DTYPES[dtype].itemsize,
        stream_itemsize=_stream_itemsize(config, dtype),
    )
    size = dict(num_frames=rollout.num_frames, height=rollout.height, width=rollout.width)
    decoding = adapter.decoding.num_bytes(rows, **size, itemsize=DTYPES[dtype].itemsize)
    num_replicas = rollout.num_replicas or max(
        1, machine.world_size // rollout.tp
    )  # as train/replicas.py starts them
    whole = found.transformers + found.others
    copies, copied = (
        _fp8_bytes(adapter, model, tp=rollout.tp, itemsize=DTYPES[dtype].itemsize)
        if rollout.fp8
        else (0, 0)
    )
    return Replicas(
        weights=whole + copies - (copied if is_asleep else 0),
        pushed=whole + (0 if is_asleep else copies),
        parked=found.others if is_asleep else 0,
        encoder=found.encoder,
        working=max(decoding, activation_bytes(model, alone, work, training=False)),
        per_gpu=math.ceil(num_replicas * rollout.tp / machine.world_size),
        sleeps=is_asleep,
        unknown=found.unknown,
    )


def _fp8_bytes(
    adapter: ModelAdapter, model: ModelShape, *, tp: int, itemsize: int
) -> tuple[int, int]:
    """Of the copies, one byte an element and a scale for each of their rows; and of what they are copies of, whose place they
    take in a replica that sleeps between samples."""
    shapes = [model.shapes[name] for name in fp8_targets(model.shapes, adapter.plan)]
    elements, rows = sum(map(math.prod, shapes)), sum(shape[0] for shape in shapes)
    count = len(adapter.components)
    return count * math.ceil((elements + FLOAT32 * rows) / tp), count * elements * itemsize // tp


def _bucket_bytes(config: Config, model: ModelShape) -> int:
    """The bucket that is sent, the next one, and the largest tensor while it is gathered and while a replica reads it."""
    largest = max(map(math.prod, model.shapes.values())) * DTYPES[config.model.dtype].itemsize
    return 2 * max(config.sync.bucket_mib * 2**20, largest) + 2 * largest


def _obstacle(config: Config, model: ModelShape, placing: Placing) -> str:
    """Why training would refuse the layout, by the config's own rules and the model's heads; "" when it would not."""
    layout, parallel = placing.layout, config.parallel
    if model.num_heads % (layout.sp * layout.tp):
        return (
            f"sp*tp = {layout.sp * layout.tp} does not divide the model's {model.num_heads} heads"
        )
    sizes = dict(dp=layout.dp, dp_replicate=layout.dp_replicate, sp=layout.sp, tp=layout.tp)
    asked = replace(
        config,
        engine=replace(config.engine, backend=placing.backend),
        parallel=replace(parallel, **sizes),
    )
    try:
        validate(asked, dp=layout.dp)
    except ConfigError as error:
        return str(error)
    return ""


def _own_placing(config: Config, machine: Machine) -> Placing | None:
    parallel, backend = config.parallel, config.engine.backend
    sizes = dict(dp=parallel.dp, sp=parallel.sp, tp=parallel.tp, dp_replicate=parallel.dp_replicate)
    try:
        layout = resolve_layout(**sizes, world_size=machine.world_size)
    except ValueError:  # written for another world
        return None
    return Placing(
        backend=backend,
        layout=layout,
        sequence_parallel=layout.tp > 1 and parallel.sequence_parallel,
    )


def _check_placement(config: Config, machine: Machine) -> None:
    """As train/replicas.py does where it knows the nodes."""
    if config.rollout.mode == "colocated" and machine.world_size > machine.gpus_per_node:
        raise ValueError(
            f"rollout.mode=colocated starts replicas on one node, but {machine.world_size} GPUs are more than a node's "
            f"{machine.gpus_per_node}; add rollout.mode=separate rollout.registry=DIR"
        )


def _divisors(value: int) -> list[int]:
    return [candidate for candidate in range(1, value + 1) if value % candidate == 0]
