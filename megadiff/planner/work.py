"""Derive from a config what one rank computes in an update."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

from megadiff.algorithms import build_algorithm
from megadiff.config.schema import Config, LoraConfig
from megadiff.engines.shared_base import shares_base
from megadiff.engines.veomni import UNSHARDED_SHARE, unsharded_bytes
from megadiff.models.adapter import ModelAdapter
from megadiff.parallel.lora import lora_shapes, lora_spec
from megadiff.planner.engine_memory import ModelShape, Placing, Work
from megadiff.train.rows import rows_per_group, train_sampling
from megadiff.types import DTYPES, Sampling, Shape


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Describe the GPUs and what their nodes have.

    num_bytes: of one GPU. host_bytes: a node's memory.
    headroom: share of both kept free, for fragmentation and what is not counted.
    """

    world_size: int
    gpus_per_node: int
    num_bytes: int
    host_bytes: int
    headroom: float

    @property
    def num_nodes(self) -> int:
        return max(1, self.world_size // self.gpus_per_node)

    @property
    def has_whole_nodes(self) -> bool:
        """Tell whether all nodes have equally many of the GPUs."""
        return self.world_size <= self.gpus_per_node or self.world_size % self.gpus_per_node == 0

    @property
    def budget(self) -> int:
        return int(self.num_bytes * (1 - self.headroom))

    @property
    def host_budget(self) -> int:
        """Return the host memory that a GPU may take: all of a node have equal parts."""
        return int(self.host_bytes * (1 - self.headroom)) // min(
            self.world_size, self.gpus_per_node
        )


def work_of(
    config: Config, model: ModelShape, placing: Placing, machine: Machine, text_tokens: int
) -> Work:
    """Return the longest microbatch of an update on one rank."""
    algorithm = build_algorithm(config.algorithm)
    sampling = train_sampling(config, algorithm)

    rows_per_step = config.train.prompts_per_step * rows_per_group(config, algorithm)
    rows = max(1, rows_per_step // placing.layout.dp // config.train.updates_per_step)
    num_microbatches = math.ceil(rows / config.train.microbatch_size)
    itemsize = DTYPES[config.engine.dtype].itemsize
    # only VeOmni shards between microbatches; Megatron's buffers are always whole
    shared = shares_on(config, model, placing)
    unsharded = unsharded_bytes(
        num_elements=model.num_trained if shared else model.num_parameters,
        num_trained=model.num_trained,
        itemsize=itemsize,
    )

    tokens = model.adapter.token_count(sampling, text_tokens)
    is_megatron = placing.backend == "megatron"
    return Work(
        rows=min(config.train.microbatch_size, rows),
        image_tokens=tokens.image,
        text_tokens=tokens.text,
        modulates_tokens=tokens.is_modulated,
        passes=num_passes(model.adapter, sampling),
        itemsize=itemsize,
        stream_itemsize=stream_itemsize(config, config.engine.dtype),
        budget=config.engine.activation_memory_budget,
        num_microbatches=num_microbatches,
        accumulates=num_microbatches > 1 and unsharded <= UNSHARDED_SHARE * machine.num_bytes,
        keeps_average=config.algorithm.ema_decay > 0,
        # Transformer Engine's layers stay as they are, and cut blocks into several graphs
        compiled=config.engine.compile and not (is_megatron and config.engine.fp8 != "none"),
        shares_base=shared,
    )


def shares_on(config: Config, model: ModelShape, placing: Placing) -> bool:
    """Tell whether ranks placed so hold LoRA's base once with their replicas, on GPUs."""
    placed = replace(config, engine=replace(config.engine, backend=placing.backend))
    return shares_base(
        placed, model.adapter, device_type="cuda", world_size=placing.layout.world_size
    )


def stream_itemsize(config: Config, dtype: str) -> int:
    """Return the bytes of a number that a block hands on, where matrix products are in dtype."""
    return DTYPES["float32" if config.model.float32_streams else dtype].itemsize


def num_passes(adapter: ModelAdapter, sampling: Sampling) -> int:
    """Return the most forwards of one velocity, over all components."""
    return max(adapter.num_passes(component, sampling) for component in adapter.components)


def model_shape(adapter: ModelAdapter, lora: LoraConfig) -> ModelShape:
    """Describe the stock transformer, built without memory, with the config's low-rank tensors."""
    shapes, num_constants = _stock_shapes(adapter)
    spec = lora_spec(lora, adapter.plan, shapes)
    return ModelShape(
        adapter=adapter,
        shapes=shapes,
        lora_spec=spec,
        lora=lora_shapes(spec, shapes),
        num_constants=num_constants,
    )


@cache
def _stock_shapes(adapter: ModelAdapter) -> tuple[dict[str, Shape], int]:
    """Return a transformer's parameters, and the number of elements of its constants."""
    module = adapter.empty_transformer()
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    buffers = dict(module.named_buffers())
    return shapes, sum(buffers[name].numel() for name in adapter.plan.constants if name in buffers)
