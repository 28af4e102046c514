"""Count the bytes that a training engine takes on one GPU, from shapes and sizes alone.

What stays between steps (parameters, optimizer, average) and the gradients of an update are exact:
they follow how the engines allocate, and tests/distributed/test_memory_plan.py compares the two.
Gathered weights are an estimate. docs/memory.md has the terms and how far they are from peaks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from megadiff.models.adapter import ModelAdapter
from megadiff.parallel.mesh import Layout
from megadiff.parallel.plan import ParallelPlan, shard_box
from megadiff.sync.shared_base import base_layout
from megadiff.types import LoraSpec, Shape, Shapes

Ranges = list[tuple[int, int]]  # (start, end) each
GIB = 2**30
FLOAT32 = 4
MOMENTS = 2 * FLOAT32  # AdamW's exp_avg and exp_avg_sq
STEP_COUNTER = FLOAT32  # AdamW's, one a parameter tensor

GATHERED_FORWARD = 2  # blocks whose weights FSDP2 holds whole at once: the one at work and the next
GATHERED_COPY = 1  # and a gathered buffer, before it is copied into parameters

# Megatron's buffers, by param_and_grad_buffer.py and distributed_data_parallel.py of
# megatron-core 0.16, in elements.
MEGATRON_PARAMETER_ALIGNMENT = 64
MEGATRON_BUCKET_ALIGNMENT = 128
MEGATRON_BUCKET_SIZE = 40_000_000
MEGATRON_BUCKET_SIZE_PER_RANK = 1_000_000  # a dp rank; the larger of the two counts


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Describe the trained components of a model, which have one shape and work one after another.

    shapes: name → shape of every parameter of a component, without LoRA's.
    lora: name → shape of every low-rank tensor, which then alone is trained; else empty.
    num_frozen: of num_components, those that are never updated.
    num_constants: elements of the plan's constants, whole and in float32 wherever the model is.
    Sizes below are of one component.
    """

    adapter: ModelAdapter
    shapes: Shapes
    lora_spec: LoraSpec | None = None
    lora: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    num_components: int = 1
    num_frozen: int = 0
    num_constants: int = 0

    @property
    def plan(self) -> ParallelPlan:
        return self.adapter.plan

    @cached_property
    def trained(self) -> dict[str, Shape]:
        """Parameters that get a gradient, in the module's order."""
        if self.lora:
            return dict(self.lora)
        unused = self.plan.unused_names(self.shapes)
        return {name: shape for name, shape in self.trainable.items() if name not in unused}

    @cached_property
    def trainable(self) -> dict[str, Shape]:
        """Parameters without those that the plan freezes and LoRA's; they may be unused."""
        return self.plan.trainable(self.shapes)

    @cached_property
    def kinds(self) -> dict[str, str]:
        """Name → how tensor parallelism shards it."""
        return self.plan.kinds([*self.shapes, *self.lora])

    @cached_property
    def num_parameters(self) -> int:
        """Count the model's elements without LoRA's."""
        return sum(map(math.prod, self.shapes.values()))

    @cached_property
    def num_trained(self) -> int:
        """Count elements with a gradient, and the unused ones where all weights are trained."""
        return sum(map(math.prod, (self.lora or self.trainable).values()))

    @cached_property
    def num_blocks(self) -> int:
        return len(self.units(self.shapes).keys() - {None})

    def units(self, shapes: Shapes) -> Counter[str | None]:
        """Return the elements of each block, and under None those of the rest."""
        sizes = Counter[str | None]()
        for name, shape in shapes.items():
            sizes[self.plan.block_of(name)] += math.prod(shape)
        return sizes


@dataclass(frozen=True, kw_only=True)
class Placing:
    """Name one way to run the engine.

    sequence_parallel: whether tokens between attention and MLP are split over tp as well.
    """

    backend: str
    layout: Layout
    sequence_parallel: bool = False

    @property
    def shards(self) -> int:
        """Ranks over which VeOmni shards, and over which Megatron shards the optimizer."""
        return self.layout.dp // self.layout.dp_replicate * self.layout.sp


@dataclass(frozen=True, kw_only=True)
class Work:
    """Describe what a rank computes, as far as its memory depends on it.

    rows: samples of a forward. image_tokens, text_tokens: of one row.
    modulates_tokens: whether each token has a timestep of its own.
    passes: forwards whose graphs exist at once, 2 under guidance.
    itemsize: bytes of a number of engine.dtype. stream_itemsize: of one that a block hands on.
    budget: share of their activations that blocks keep. num_microbatches: of an update.
    accumulates: whether gradients stay whole on each rank between microbatches.
    keeps_average: whether the engine keeps a running average of the weights.
    compiled: whether blocks are.
    shares_base: whether LoRA's base lies whole on the rank, for its replica too.
    """

    rows: int
    image_tokens: int
    text_tokens: int
    modulates_tokens: bool = False
    passes: int
    itemsize: int
    stream_itemsize: int
    budget: float
    num_microbatches: int
    accumulates: bool
    keeps_average: bool
    compiled: bool = False
    shares_base: bool = False


@dataclass(frozen=True, kw_only=True)
class Static:
    """Hold the bytes on the fullest rank.

    gradients: of the component whose update it is, gone when that is over.
    reference: float32 weights of a reference policy on the host. With LoRA it takes nothing: it is
    the adapter switched off. masters: the trained weights in float32, wherever they are.
    """

    reference: int
    masters: int
    parameters: int
    gradients: int
    optimizer: int
    average: int


def static_bytes(
    model: ModelShape, placing: Placing, work: Work, *, offloads: bool = False
) -> Static:
    """Return what lives from step to step, and the gradients of a component's update.

    offloads: whether a component's optimizer and average wait on the host until it is its turn.
    Raises ValueError for a tp that does not divide a sharded parameter.
    """
    component = STATIC[placing.backend](model, placing, work)
    num_updated = model.num_components - model.num_frozen
    num_awake = min(1, num_updated) if offloads else num_updated
    frozen = model.num_frozen * work.itemsize * WHOLE[placing.backend](model, placing)

    return Static(
        reference=num_updated * component.reference,
        masters=num_updated * component.masters,
        parameters=num_updated * component.parameters + frozen,
        gradients=component.gradients,
        optimizer=num_awake * component.optimizer,
        average=num_awake * component.average,
    )


def gathered_bytes(model: ModelShape, placing: Placing, work: Work, *, training: bool) -> int:
    """Estimate whole weights and gradients that exist for a while beside the rank's own shards."""
    return GATHERED[placing.backend](model, placing, work, training=training)


def _veomni_static(model: ModelShape, placing: Placing, work: Work) -> Static:
    """FSDP2 splits dimension 0 into equal chunks, the last ones padded.

    Masters, gradients and moments are float32. What is frozen is in engine.dtype.
    """
    base = _fsdp_elements(model, placing)
    lora = sum(fsdp_shard(shape, placing.shards) for shape in model.lora.values())
    trainable = sum(fsdp_shard(shape, placing.shards) for shape in model.trainable.values())
    trained = [fsdp_shard(shape, placing.shards) for shape in model.trained.values()]
    masters = FLOAT32 * (lora or trainable)

    frozen = work.itemsize * (base if lora else base - trainable)
    if work.shares_base:
        served_names = model.adapter.served_names or {}
        frozen = base_layout(model.shapes, work.itemsize, served_names).num_bytes

    return Static(
        reference=0 if lora else masters,
        masters=masters,
        parameters=masters + frozen,
        gradients=FLOAT32 * sum(trained),
        optimizer=MOMENTS * sum(trained) + STEP_COUNTER * len(trained),
        average=masters if work.keeps_average else 0,
    )


def _fsdp_elements(model: ModelShape, placing: Placing) -> int:
    """Count the elements of a rank's shards of a component, without LoRA's."""
    return sum(fsdp_shard(shape, placing.shards) for shape in model.shapes.values())


def fsdp_shard(shape: Shape, shards: int) -> int:
    return math.ceil(shape[0] / shards) * math.prod(shape[1:])


def _veomni_gathered(model: ModelShape, placing: Placing, work: Work, *, training: bool) -> int:
    """Count whole weights and gradients: of the model under accumulation, else block by block."""
    # of a shared base nothing is gathered
    gathered = model.lora if work.shares_base else model.shapes
    if training and work.accumulates:
        # Until the last backward reduces them. A rank's own gradients (Static.gradients) come
        # beside: a block frees memory on the stream that computes, and reduced shards are taken on
        # another.
        num_gathered = sum(map(math.prod, gathered.values()))
        return num_gathered * work.itemsize + FLOAT32 * model.num_trained

    num_blocks = GATHERED_FORWARD + (0 if training else GATHERED_COPY)
    units = model.units(gathered)
    root_elements = units.pop(None, 0)
    elements = root_elements + num_blocks * max(units.values(), default=0)
    if not training:
        return work.itemsize * elements

    trained = model.units(model.lora or model.trainable)
    # The largest block counts: gradients are reduced block by block.
    trained.pop(None, 0)
    # in engine.dtype, and in float32 as the reduction's input
    gradients = max(trained.values(), default=0) * (work.itemsize + FLOAT32)
    return work.itemsize * elements + gradients


def _megatron_static(model: ModelShape, placing: Placing, work: Work) -> Static:
    """Megatron has whole tp shards in engine.dtype and float32 gradients, both in padded buffers.

    Each bucket of a buffer is cut into dp·sp equal ranges. A rank's optimizer holds what lies in
    its own: moments, and under bfloat16 float32 masters.
    """
    layout = placing.layout
    sizes = _tp_sizes(model, placing)
    trained = {name: sizes[name] for name in model.trained}
    frozen = sum(sizes.values()) - sum(trained.values())

    num_ranks = layout.dp * layout.sp
    buckets, ranges = megatron_buffer(
        # the module's last first, roughly as backward makes their gradients
        list(reversed(trained.values())),
        ranks=num_ranks,
        bucket_size=max(MEGATRON_BUCKET_SIZE, MEGATRON_BUCKET_SIZE_PER_RANK * layout.dp),
    )
    buffer = buckets[-1][1]
    elements, num_tensors = max(_owned(buckets, ranges, num_ranks=num_ranks))

    # beside the weights; masters of unused weights are on the host
    has_masters = work.itemsize < FLOAT32
    trainable = sum(sizes[name] for name in model.trainable)
    unused = 0 if model.lora else trainable - sum(trained.values())
    averaged = elements + (0 if has_masters else unused)
    moments_and_masters = MOMENTS + (FLOAT32 if has_masters else 0)

    return Static(
        reference=0 if model.lora else FLOAT32 * (elements + unused),
        masters=FLOAT32 * averaged,
        parameters=work.itemsize * (buffer + frozen),
        gradients=FLOAT32 * buffer,
        optimizer=moments_and_masters * elements + STEP_COUNTER * num_tensors,
        average=FLOAT32 * averaged if work.keeps_average else 0,
    )


def _tp_sizes(model: ModelShape, placing: Placing) -> dict[str, int]:
    """Count each parameter's elements, LoRA's included, on the first tensor-parallel rank."""
    shapes = {**model.shapes, **model.lora}
    sizes = {}
    for name, kind in model.kinds.items():
        _, local_shape = shard_box(kind, name, shapes[name], tp=placing.layout.tp, tp_rank=0)
        sizes[name] = math.prod(local_shape)
    return sizes


def _tp_elements(model: ModelShape, placing: Placing) -> int:
    """Count the elements of a rank's shards of a component, without LoRA's."""
    return sum(size for name, size in _tp_sizes(model, placing).items() if name not in model.lora)


def _megatron_gathered(model: ModelShape, placing: Placing, work: Work, *, training: bool) -> int:
    """Count the gradient of one parameter in engine.dtype, before it is added to the buffer."""
    largest = max(math.prod(shape) for shape in model.trained.values())
    return work.itemsize * largest // placing.layout.tp if training else 0


def megatron_buffer(sizes: Sequence[int], *, ranks: int, bucket_size: int) -> tuple[Ranges, Ranges]:
    """Return (start, end) of each bucket and of each parameter in Megatron's buffers, in elements.

    sizes: of the parameters as the buffer has them, the module's last one first.
    bucket_size: a bucket is closed when it is reached.
    """
    divisor = math.lcm(ranks, MEGATRON_BUCKET_ALIGNMENT)
    buckets: Ranges = []
    ranges: Ranges = []
    bucket_start = 0
    end = 0

    for size in sizes:
        start = round_up(end, MEGATRON_PARAMETER_ALIGNMENT)
        end = start + size
        ranges.append((start, end))
        if end - bucket_start >= bucket_size:
            end = round_up(end, divisor)
            buckets.append((bucket_start, end))
            bucket_start = end

    if end > bucket_start:
        buckets.append((bucket_start, round_up(end, divisor)))
    return buckets, ranges


def _owned(buckets: Ranges, ranges: Ranges, *, num_ranks: int) -> list[tuple[int, int]]:
    """Return (elements, parameters) of each rank, which owns an equal range of every bucket."""
    elements = [0] * num_ranks
    num_tensors = [0] * num_ranks
    bucket = 0

    for start, end in ranges:
        # both ascend, and a parameter lies in one bucket
        while start >= buckets[bucket][1]:
            bucket += 1
        bucket_start, bucket_end = buckets[bucket]
        size = (bucket_end - bucket_start) // num_ranks
        first = (start - bucket_start) // size
        last = (end - 1 - bucket_start) // size
        for rank in range(first, last + 1):
            own_start = bucket_start + rank * size
            elements[rank] += min(end, own_start + size) - max(start, own_start)
            num_tensors[rank] += 1
    return list(zip(elements, num_tensors, strict=True))


def round_up(value: int, multiple: int) -> int:
    return math.ceil(value / multiple) * multiple


STATIC = {
    "veomni": _veomni_static,
    "megatron": _megatron_static,
}
WHOLE = {
    "veomni": _fsdp_elements,
    "megatron": _tp_elements,
}
GATHERED = {
    "veomni": _veomni_gathered,
    "megatron": _megatron_gathered,
}
