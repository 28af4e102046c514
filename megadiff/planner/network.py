"""Count the bytes that a step of training sends between GPUs, and the seconds that links need.

A collective is counted as a ring makes it: to gather a buffer of B bytes, or to scatter its sums,
each of n ranks sends B·(n − 1)/n; an all-reduce does both. That is NCCL's "bus bandwidth"
(nccl-tests, doc/PERFORMANCE.md), in which links are measured. Ulysses and sequence parallelism:
arXiv 2309.14509 section 3, arXiv 2205.05198 section 4. FSDP2: fully_shard's own prefetch and hooks.
tests/distributed/test_network.py counts what engines send, on gloo.
Not counted: norms, modulations, figures of the loop. They are thousandths of the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from megadiff.parallel.recompute import kept_blocks
from megadiff.planner.activation_memory import gathered_tokens
from megadiff.planner.engine_memory import FLOAT32, ModelShape, Placing, Work, fsdp_shard, round_up

WEIGHTS = "weights"
GRADIENTS = "gradients"
REPLICAS = "replicas"  # of shards: HSDP
TOKENS = "tokens"
FEATURES = "features"
PUSH = "push"
PURPOSES = (WEIGHTS, GRADIENTS, REPLICAS, TOKENS, FEATURES, PUSH)
EXCHANGED = 4  # query, key, value, and attention's output


@dataclass(frozen=True, kw_only=True)
class Links:
    """Give what links carry in a second, in bytes, each way.

    nvlink: of one GPU within its node. network: of one node, all of its GPUs together.
    """

    gpus_per_node: int
    nvlink: float
    network: float


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Sum the collectives of one purpose over a step.

    num_bytes: of the buffers. size: ranks of a group, which are `stride` apart.
    rounds: how often a ring carries a buffer round, 2 for an all-reduce.
    is_hidden: whether GPUs compute meanwhile. is_lone: whether there is one group only, else every
    rank is in one.
    """

    purpose: str
    num_bytes: float
    size: int
    stride: int = 1
    rounds: int = 1
    is_hidden: bool = False
    is_lone: bool = False

    @property
    def sent(self) -> float:
        """Bytes that one GPU sends."""
        return self.rounds * self.num_bytes * (self.size - 1) / self.size

    def crosses(self, gpus_per_node: int) -> bool:
        return self.size * self.stride > gpus_per_node and self.size > 1

    def members(self, gpus_per_node: int) -> int:
        """Return how many ranks of a group are on one node."""
        if not self.crosses(gpus_per_node):
            return self.size
        return max(1, gpus_per_node // self.stride)

    def network_bytes(self, gpus_per_node: int) -> float:
        """Return the bytes that leave a node: a ring goes in and out of it once."""
        if not self.crosses(gpus_per_node):
            return 0.0
        num_groups = 1 if self.is_lone else gpus_per_node // self.members(gpus_per_node)
        return num_groups * self.sent

    def nvlink_s(self, links: Links) -> float:
        return self.sent / links.nvlink if self.members(links.gpus_per_node) > 1 else 0.0

    def network_s(self, links: Links) -> float:
        if not self.crosses(links.gpus_per_node):
            return 0.0
        # a group has its own members' part of the node's network
        gpus_per_node = links.gpus_per_node
        return self.sent / (links.network * self.members(gpus_per_node) / gpus_per_node)


@dataclass(frozen=True, kw_only=True)
class StepPasses:
    """Count the passes of a step.

    components: that are updated. updates: of each. microbatches: of an update of one component.
    forwards: of one component's microbatches without gradient.
    """

    components: int = 1
    updates: int
    microbatches: int
    forwards: int = 0

    @property
    def with_gradient(self) -> int:
        return self.components * self.updates * self.microbatches

    @property
    def without_gradient(self) -> int:
        return self.components * self.forwards


def step_traffic(
    model: ModelShape, placing: Placing, work: Work, passes: StepPasses
) -> list[Traffic]:
    """Return what the passes of a step send, purpose by purpose; groups of one send nothing."""
    backend = {"veomni": fsdp_traffic, "megatron": megatron_traffic}[placing.backend]
    rows = [
        *backend(model, placing, work, passes),
        ulysses_traffic(model, placing, work, passes),
        tp_traffic(model, placing, work, passes),
    ]
    return [row for row in rows if row.size > 1 and row.num_bytes]


def fsdp_traffic(
    model: ModelShape, placing: Placing, work: Work, passes: StepPasses
) -> list[Traffic]:
    """Count FSDP2's gathers of weights, its reductions of gradients, and those across replicas.

    What is outside of the blocks is whole from forward to backward. A block is gathered for each
    forward and each backward, of which guidance has two; its gradient is reduced once. Where whole
    weights fit, they are gathered in an update's first microbatch and gradients are reduced in its
    last (Work.accumulates): with guidance twice, those of all microbatches before and then the
    last backward's.
    """
    base = {} if work.shares_base else model.shapes  # of a shared base nothing is gathered
    rest, blocks = _padded(model, {**base, **model.lora}, placing.shards)
    trained_rest, trained_blocks = _padded(model, model.trained, placing.shards)
    once = work.accumulates and passes.microbatches > 1
    num_updates = passes.components * passes.updates

    elements: float = passes.without_gradient * (rest + work.passes * blocks)
    if once:
        elements += num_updates * (rest + blocks)
    else:
        elements += passes.with_gradient * (rest + 2 * work.passes * blocks)

    reduced: float = passes.with_gradient * (trained_rest + trained_blocks)
    if once:
        reduced = num_updates * (trained_rest + work.passes * trained_blocks)
    gradients = FLOAT32 * reduced
    return [
        Traffic(
            purpose=WEIGHTS,
            num_bytes=work.itemsize * elements,
            size=placing.shards,
            is_hidden=True,
        ),
        Traffic(purpose=GRADIENTS, num_bytes=gradients, size=placing.shards, is_hidden=True),
        Traffic(
            purpose=REPLICAS,
            num_bytes=gradients / placing.shards,
            size=placing.layout.dp_replicate,
            stride=placing.shards,
            rounds=2,
            is_hidden=True,
        ),
    ]


def megatron_traffic(
    model: ModelShape, placing: Placing, work: Work, passes: StepPasses
) -> list[Traffic]:
    """Count the distributed optimizer's: sums of gradients, and updated weights, once an update."""
    layout = placing.layout
    tp_parts = [prod(shape) / layout.tp for shape in model.trained.values()]
    num_bytes = passes.components * passes.updates * sum(tp_parts)
    weights = Traffic(  # the next forward waits for it
        purpose=WEIGHTS,
        num_bytes=work.itemsize * num_bytes,
        size=layout.dp * layout.sp,
        stride=layout.tp,
    )
    gradients = replace(weights, purpose=GRADIENTS, num_bytes=FLOAT32 * num_bytes, is_hidden=True)
    return [weights, gradients]


def ulysses_traffic(model: ModelShape, placing: Placing, work: Work, passes: StepPasses) -> Traffic:
    """Count the exchanges of heads for tokens around self attention, forward and backward.

    VeOmni's own module also gathers the image stream after the blocks, and sums its gradient.
    """
    layout = placing.layout
    tokens = gathered_tokens(model, placing, work)
    exchange = EXCHANGED * tokens * model.adapter.width / layout.tp * work.itemsize
    num_bytes = exchange * _block_passes(model, work, passes, backward=1.0)
    if placing.backend == "veomni" and model.adapter.veomni_splits_tokens:
        stream = work.rows * round_up(work.image_tokens, layout.sp) * model.adapter.width
        # a gather, and an all-reduce, which goes round twice
        num_streams = work.passes * (3 * passes.with_gradient + passes.without_gradient)
        num_bytes += work.itemsize * num_streams * stream
    return Traffic(
        purpose=TOKENS,
        num_bytes=num_bytes,
        size=layout.sp,
        stride=layout.tp,
    )


def tp_traffic(model: ModelShape, placing: Placing, work: Work, passes: StepPasses) -> Traffic:
    """Count what enters and leaves layers whose features are split.

    Around each attention and MLP tokens are gathered and their sums scattered, or without sequence
    parallelism reduced for all, which is as much. Backward does the same the other way round. There
    an MLP's first layer gathers its input again.
    """
    layout = placing.layout
    tokens = gathered_tokens(model, placing, work)
    rows = [name for name, kind in model.kinds.items() if kind == "row" and name in model.shapes]
    rows = [name for name in rows if name.endswith(".weight")]
    # text and image are two streams of one site
    streams = model.plan.num_streams
    num_sites = len(rows) / model.num_blocks / streams
    num_mlps = sum(not model.plan.in_attention(name) for name in rows) / model.num_blocks / streams
    gathered_again = num_mlps / 2 if placing.sequence_parallel else 0.0

    per_block = 2 * tokens * model.adapter.width * work.itemsize
    block_passes = _block_passes(model, work, passes, backward=1 + gathered_again / num_sites)
    return Traffic(purpose=FEATURES, num_bytes=num_sites * per_block * block_passes, size=layout.tp)


def push_traffic(
    placing: Placing, *, pushed_bytes: int, links: Links, is_separate: bool
) -> list[Traffic]:
    """Count a push: the gathers of whole weights, and their way to replicas on other nodes.

    Colocated replicas take them from the ranks of their own node. So a push costs the same for any
    number of nodes, while shards lie within a node. Into each node of separate replicas they go
    once, from one GPU.
    """
    size = placing.shards if placing.backend == "veomni" else placing.layout.tp
    rows = [Traffic(purpose=PUSH, num_bytes=pushed_bytes, size=size)]
    if is_separate:
        # a chain of two nodes sends a buffer as it is: 2 · B · (2 − 1) / 2
        chain = Traffic(
            purpose=PUSH,
            num_bytes=pushed_bytes,
            size=2,
            rounds=2,
            stride=links.gpus_per_node,
            is_lone=True,
        )
        rows.append(chain)
    return [row for row in rows if row.size > 1 and row.num_bytes]


def link_seconds(traffic: Sequence[Traffic], links: Links, *, is_hidden: bool) -> float:
    """Return the seconds of links beside computation, or of those that GPUs wait for.

    What is hidden runs on streams of its own, on both kinds of links at once.
    """
    rows = [row for row in traffic if row.is_hidden == is_hidden]
    if is_hidden:
        return max(
            sum(row.nvlink_s(links) for row in rows), sum(row.network_s(links) for row in rows)
        )
    # one after another, but a ring is on both kinds of links at once
    return sum(max(row.nvlink_s(links), row.network_s(links)) for row in rows)


def _block_passes(model: ModelShape, work: Work, passes: StepPasses, *, backward: float) -> float:
    """Return how often a block runs, over all blocks; a backward counts as so many forwards."""
    recomputed = model.num_blocks - len(kept_blocks(model.num_blocks, work.budget))
    with_gradient = model.num_blocks * (1 + backward) + recomputed
    return work.passes * (
        passes.with_gradient * with_gradient + passes.without_gradient * model.num_blocks
    )


def _padded(
    model: ModelShape, shapes: Mapping[str, tuple[int, ...]], shards: int
) -> tuple[int, int]:
    """Return the elements outside and inside of the blocks, with FSDP2's padding."""
    rest = 0
    blocks = 0
    for name, shape in shapes.items():
        elements = shards * fsdp_shard(shape, shards)
        if model.plan.block_of(name) is None:
            rest += elements
        else:
            blocks += elements
    return rest, blocks
