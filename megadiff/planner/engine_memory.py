"""How many bytes a training engine takes on one GPU: arithmetic on shapes and sizes, no tensors and no files.

What stays between steps (parameters, optimizer, average) and the gradients of an update are exact: they follow how the
engines allocate, and tests/distributed/test_memory_plan.py compares the two. What else exists within a step (activations,
gathered weights) is an estimate for eager PyTorch; docs/memory.md has its terms and how far it is from measurements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from megadiff.models.activations import Activations, Kept, Part
from megadiff.parallel.mesh import Layout
from megadiff.parallel.plan import LORA_A, ParallelPlan, shard_box
from megadiff.parallel.recompute import kept_blocks

GIB = 2**30
FLOAT32 = 4
MOMENTS = 2 * FLOAT32  # AdamW's exp_avg and exp_avg_sq
STEP_COUNTER = FLOAT32  # AdamW's, one a parameter tensor

MLP_TENSORS = 2  # of its width: before and after the activation, kept or alive at once
GATHERED_FORWARD = 2  # blocks whose weights FSDP2 holds whole at once: the one at work and the next
GATHERED_COPY = 1  # and a gathered buffer, before it is copied into parameters

MEGATRON_PARAMETER_ALIGNMENT = 64  # elements; param_and_grad_buffer.py of megatron-core 0.16
MEGATRON_BUCKET_ALIGNMENT = 128
MEGATRON_BUCKET_SIZE = (
    40_000_000  # elements, of distributed_data_parallel.py; or this many a dp rank, if that is more
)
MEGATRON_BUCKET_SIZE_PER_RANK = 1_000_000


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """shapes: name → shape of every parameter of a trained component, without LoRA's. width: features of a token. lora:
    name → shape of every low-rank tensor, which then alone is trained; empty where all weights are. mlp_ratio: of an MLP's
    width to that. num_components: of this shape, which work one after another; num_frozen: of these, those that are
    never updated. idle_offloaded: whether several of them have what only an update needs on the host until it is their turn.
    Sizes below are of one component."""

    shapes: Mapping[str, tuple[int, ...]]
    plan: ParallelPlan
    width: int
    num_heads: int
    mlp_ratio: float
    activations: Activations
    lora: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    num_components: int = 1
    num_frozen: int = 0
    idle_offloaded: bool = False

    @cached_property
    def trained(self) -> dict[str, tuple[int, ...]]:
        """Parameters that get a gradient, in the module's order."""
        unused = self.plan.unused_names(self.shapes)
        return dict(self.lora) or {
            name: shape for name, shape in self.shapes.items() if name not in unused
        }

    @cached_property
    def kinds(self) -> dict[str, str]:
        """Name → how tensor parallelism shards it."""
        return self.plan.kinds([*self.shapes, *self.lora])

    @cached_property
    def num_parameters(self) -> int:
        """Of the model, without LoRA's."""
        return sum(map(math.prod, self.shapes.values()))

    @cached_property
    def num_trained(self) -> int:
        """Elements with a gradient, the unused ones of a whole model included."""
        return sum(map(math.prod, self.lora.values())) or self.num_parameters

    @cached_property
    def num_blocks(self) -> int:
        return len(self._units(self.shapes).keys() - {None})

    @cached_property
    def block_elements(self) -> int:
        """Elements of the largest block, without LoRA's."""
        return max(
            (size for unit, size in self._units(self.shapes).items() if unit is not None), default=0
        )

    @cached_property
    def trained_block_elements(self) -> int:
        """Elements with a gradient of the largest block."""
        sizes = self._units(self.lora or self.shapes)
        return max((size for unit, size in sizes.items() if unit is not None), default=0)

    def kept(self, *, compiled: bool) -> Kept:
        return self.activations.kept(lora=bool(self.lora), compiled=compiled)

    @cached_property
    def lora_ranks(self) -> int:
        """Features of all low-rank products that a token goes through in a block; where text is a stream of the blocks, it
        has layers of its own."""
        firsts = {name: shape for name, shape in self.lora.items() if name.endswith(LORA_A)}
        ranks = self._units({name: shape[:1] for name, shape in firsts.items()})
        return math.ceil(
            max(ranks.values(), default=0) / (2 if self.activations.text_is_stream else 1)
        )

    @cached_property
    def root_elements(self) -> int:
        """Elements outside the blocks."""
        return self._units(self.shapes).get(None, 0)

    def _units(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[int | None, int]:
        """Elements of each block, and under None of the rest."""
        sizes: dict[int | None, int] = {}
        for name, shape in shapes.items():
            unit = self.plan.block_of(name)
            sizes[unit] = sizes.get(unit, 0) + math.prod(shape)
        return sizes


@dataclass(frozen=True, kw_only=True)
class Placing:
    """One way to run the engine. sequence_parallel: tokens between attention and MLP are split over tp as well."""

    backend: str
    layout: Layout
    sequence_parallel: bool = False

    @property
    def shards(self) -> int:
        """Ranks over which VeOmni shards, and over which Megatron shards the optimizer."""
        return self.layout.dp // self.layout.dp_replicate * self.layout.sp


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a rank computes, as far as its memory depends on it.

    rows: samples of a forward. image_tokens, text_tokens: of one row. modulates_tokens: whether each token has a timestep
    of its own. passes: forwards whose graphs exist at once, 2 under guidance. itemsize: bytes of a number of engine.dtype.
    stream_itemsize: of one that a block hands on. budget: share of their activations that blocks keep. num_microbatches: of
    an update. accumulates: whether gradients stay whole on each rank between microbatches. keeps_average: whether the
    engine keeps a running average of the weights. compiled: whether blocks are.
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


@dataclass(frozen=True, kw_only=True)
class Static:
    """Bytes on the fullest rank. gradients: of the component whose update it is, and gone when that is over. reference: what a
    reference policy takes on the host, the float32 weights; with LoRA it is the adapter switched off and takes nothing."""

    reference: int
    parameters: int
    gradients: int
    optimizer: int
    average: int


def static_bytes(model: ModelShape, placing: Placing, work: Work) -> Static:
    """What lives from step to step, while a component is updated. Raises ValueError for a tp that does not divide a sharded
    parameter."""
    one = STATIC[placing.backend](model, placing, work)
    count = model.num_components - model.num_frozen
    awake = 1 if model.idle_offloaded else count
    frozen = model.num_frozen * work.itemsize * WHOLE[placing.backend](model, placing)
    return Static(
        reference=count * one.reference,
        parameters=count * one.parameters + frozen,
        gradients=one.gradients,
        optimizer=awake * one.optimizer,
        average=count * one.average,
    )


def gathered_bytes(model: ModelShape, placing: Placing, work: Work, *, training: bool) -> int:
    """Whole weights and gradients that exist for a while beside the rank's own pieces (an estimate)."""
    return GATHERED[placing.backend](model, placing, work, training=training)


def activation_bytes(model: ModelShape, placing: Placing, work: Work, *, training: bool) -> int:
    """Kept for the backward, and of the one block at work (an estimate for eager PyTorch with a fused attention)."""
    use, tokens = model.activations, _tokens(model, placing, work)
    at_once = _mlp_bytes(model, placing, work)
    if not training:
        at_once += _widened(model, placing, work, use.widened.forward)
        return round(model.width * tokens.split * use.forward.num_bytes(work.itemsize)) + at_once
    backward = round(model.width * tokens.split * use.backward.num_bytes(work.itemsize)) + at_once
    again = _kept_by_block(model, placing, work) if work.budget < 1 else 0
    return kept_bytes(model, placing, work) + again + backward


def kept_bytes(model: ModelShape, placing: Placing, work: Work) -> int:
    """What autograd keeps of the forward passes before a backward: of a compiled block its inputs and the budget's share of
    the rest, of others all or the inputs."""
    kept, tokens = model.kept(compiled=work.compiled), _tokens(model, placing, work)
    outside = model.width * (
        tokens.split * _with_modulation(kept.outside, kept.outside_modulation, work)
        + tokens.context * kept.outside_context.num_bytes(work.itemsize)
    )
    whole = model.num_blocks * work.budget
    if not work.compiled or placing.layout.sp > 1:
        whole = len(kept_blocks(model.num_blocks, work.budget))
    inputs = (model.num_blocks - whole) * model.width * work.stream_itemsize * tokens.split
    outside += _widened(model, placing, work, model.activations.widened.outside)
    return work.passes * round(outside + inputs + whole * _kept_by_block(model, placing, work))


def _widened(model: ModelShape, placing: Placing, work: Work, elements: int) -> int:
    """What this many numbers of each token and feature take more where streams are float32."""
    return (
        elements
        * model.width
        * _tokens(model, placing, work).split
        * (work.stream_itemsize - work.itemsize)
    )


def _kept_by_block(model: ModelShape, placing: Placing, work: Work) -> int:
    kept, tokens, tp = (
        model.kept(compiled=work.compiled),
        _tokens(model, placing, work),
        placing.layout.tp,
    )
    per_width = (
        tokens.split * _with_modulation(kept.tokenwise, kept.modulation, work)
        + tokens.gathered * kept.gathered.num_bytes(work.itemsize)
        + tokens.gathered * kept.heads.num_bytes(work.itemsize) / tp
        + tokens.context
        * kept.context.num_bytes(work.itemsize)
        / (1 if placing.sequence_parallel else tp)
    )
    products = work.itemsize * model.lora_ranks * (tokens.gathered + tokens.context)  # A x
    widened = _widened(model, placing, work, model.activations.widened.block)
    return round(model.width * per_width) + widened + _mlp_bytes(model, placing, work) + products


def _with_modulation(part: Part, modulation: Part, work: Work) -> float:
    return part.num_bytes(work.itemsize) + (
        modulation.num_bytes(work.itemsize) if work.modulates_tokens else 0
    )


def _mlp_bytes(model: ModelShape, placing: Placing, work: Work) -> int:
    tokens = _tokens(model, placing, work)
    return round(
        MLP_TENSORS
        * model.mlp_ratio
        * model.width
        * work.itemsize
        * tokens.gathered
        / placing.layout.tp
    )


@dataclass(frozen=True, kw_only=True)
class RankTokens:
    """Of a rank's rows, padded to what splits evenly. split: over sp, under sequence parallelism over tp as well. gathered:
    those that attention projections and MLPs see, which tp does not split. context: of the text that cross attention reads,
    which nothing splits; under sequence parallelism each part of the image reads its own copy of k and v."""

    split: int
    gathered: int
    context: int


def _tokens(model: ModelShape, placing: Placing, work: Work) -> RankTokens:
    sp, tp = placing.layout.sp, placing.layout.tp if placing.sequence_parallel else 1
    is_stream = model.activations.text_is_stream
    streams = (work.image_tokens, work.text_tokens) if is_stream else (work.image_tokens,)
    split = work.rows * sum(math.ceil(tokens / (sp * tp)) for tokens in streams)
    return RankTokens(
        split=split, gathered=split * tp, context=0 if is_stream else work.rows * work.text_tokens
    )


def _veomni_static(model: ModelShape, placing: Placing, work: Work) -> Static:
    """FSDP2 splits dimension 0 into equal chunks, the last ones padded; masters, gradients and moments are float32, what
    LoRA leaves frozen is in engine.dtype."""
    base = _fsdp_elements(model, placing)
    lora = sum(_fsdp_piece(shape, placing.shards) for shape in model.lora.values())
    trained = [_fsdp_piece(shape, placing.shards) for shape in model.trained.values()]
    masters = FLOAT32 * (lora or base)
    return Static(
        reference=0 if lora else masters,
        parameters=masters + (work.itemsize * base if lora else 0),
        gradients=FLOAT32 * sum(trained),
        optimizer=MOMENTS * sum(trained) + STEP_COUNTER * len(trained),
        average=masters if work.keeps_average else 0,
    )


def _fsdp_elements(model: ModelShape, placing: Placing) -> int:
    """Of a rank's pieces of a component, without LoRA's."""
    return sum(_fsdp_piece(shape, placing.shards) for shape in model.shapes.values())


def _fsdp_piece(shape: tuple[int, ...], shards: int) -> int:
    return math.ceil(shape[0] / shards) * math.prod(shape[1:])


def _veomni_gathered(model: ModelShape, placing: Placing, work: Work, *, training: bool) -> int:
    """Under accumulation all weights stay whole in engine.dtype and all gradients in float32, until the last backward
    reduces them; else block by block. A rank's own pieces (Static.gradients) come beside them: what a block frees then is
    the stream's that computes, and pieces are taken on the one that reduces."""
    if training and work.accumulates:
        return model.num_parameters * work.itemsize + FLOAT32 * model.num_trained
    weights = (
        model.root_elements
        + (GATHERED_FORWARD + (0 if training else GATHERED_COPY)) * model.block_elements
    )
    gradients = (
        model.trained_block_elements * (work.itemsize + FLOAT32) if training else 0
    )  # and their reduction's input
    return work.itemsize * weights + gradients


def _megatron_static(model: ModelShape, placing: Placing, work: Work) -> Static:
    """Whole tp shards in engine.dtype and float32 gradients, both in padded buffers; each bucket of them is cut into dp·sp
    equal ranges, and a rank's optimizer holds what lies in its own: moments, and under bfloat16 float32 masters."""
    layout = placing.layout
    sizes = _tp_sizes(model, placing)
    trained = {name: sizes[name] for name in model.trained}
    frozen = sum(sizes.values()) - sum(trained.values())
    ranks = layout.dp * layout.sp
    buckets, places = megatron_buffer(
        list(reversed(trained.values())),
        ranks=ranks,
        bucket_size=max(MEGATRON_BUCKET_SIZE, MEGATRON_BUCKET_SIZE_PER_RANK * layout.dp),
    )
    buffer = buckets[-1][1]
    elements, pieces = max(_owned(buckets, places, ranks=ranks))
    has_masters = (
        work.itemsize < FLOAT32
    )  # beside the weights; those of unused weights are on the host
    unused = 0 if model.lora else frozen
    return Static(
        reference=0 if model.lora else FLOAT32 * (elements + unused),
        parameters=work.itemsize * (buffer + frozen),
        gradients=FLOAT32 * buffer,
        optimizer=(MOMENTS + (FLOAT32 if has_masters else 0)) * elements + STEP_COUNTER * pieces,
        average=FLOAT32 * (elements + (0 if has_masters else unused)) if work.keeps_average else 0,
    )


def _tp_sizes(model: ModelShape, placing: Placing) -> dict[str, int]:
    """Elements of each parameter, LoRA's included, on the first of the tensor-parallel ranks."""
    shapes = {**model.shapes, **model.lora}
    return {
        name: math.prod(shard_box(kind, name, shapes[name], tp=placing.layout.tp, tp_rank=0)[1])
        for name, kind in model.kinds.items()
    }


def _tp_elements(model: ModelShape, placing: Placing) -> int:
    """Of a rank's part of a component, without LoRA's."""
    return sum(size for name, size in _tp_sizes(model, placing).items() if name not in model.lora)


def _megatron_gathered(model: ModelShape, placing: Placing, work: Work, *, training: bool) -> int:
    """The gradient of one parameter in engine.dtype, before it is added to the buffer."""
    largest = max(math.prod(shape) for shape in model.trained.values())
    return work.itemsize * largest // placing.layout.tp if training else 0


def megatron_buffer(
    sizes: Sequence[int], *, ranks: int, bucket_size: int | None
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(start, end) of each bucket and of each parameter in Megatron's buffers, in elements. sizes: of the parameters as
    the buffer has them, the module's last one first. bucket_size: a bucket is closed when it is reached; None: one bucket.
    """
    divisor = math.lcm(ranks, MEGATRON_BUCKET_ALIGNMENT)
    buckets: list[tuple[int, int]] = []
    places: list[tuple[int, int]] = []
    start = position = 0
    for size in sizes:
        begin = _round_up(position, MEGATRON_PARAMETER_ALIGNMENT)
        position = begin + size
        places.append((begin, position))
        if bucket_size is not None and position - start >= bucket_size:
            position = _round_up(position, divisor)
            buckets.append((start, position))
            start = position
    if position > start:
        buckets.append((start, _round_up(position, divisor)))
    return buckets, places


def _owned(
    buckets: Sequence[tuple[int, int]], places: Sequence[tuple[int, int]], *, ranks: int
) -> list[tuple[int, int]]:
    """(elements, parameters) of each rank: of every bucket it owns one of `ranks` equal ranges."""
    elements, pieces = [0] * ranks, [0] * ranks
    rest = iter(places)
    place = next(rest, None)
    for start, end in buckets:
        size = (end - start) // ranks
        while place is not None and place[0] < end:
            begin, stop = place
            for rank in range((begin - start) // size, (stop - 1 - start) // size + 1):
                elements[rank] += min(stop, start + (rank + 1) * size) - max(
                    begin, start + rank * size
                )
                pieces[rank] += 1
            place = next(rest, None)
    return list(zip(elements, pieces, strict=True))


def _round_up(value: int, of: int) -> int:
    return math.ceil(value / of) * of


STATIC: dict[str, Callable[[ModelShape, Placing, Work], Static]] = {
    "veomni": _veomni_static,
    "megatron": _megatron_static,
}
WHOLE: dict[str, Callable[[ModelShape, Placing], int]] = {
    "veomni": _fsdp_elements,
    "megatron": _tp_elements,
}
GATHERED: dict[str, Callable[..., int]] = {
    "veomni": _veomni_gathered,
    "megatron": _megatron_gathered,
}
