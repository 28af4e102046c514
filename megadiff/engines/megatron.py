"""The Megatron engine: the stock diffusers transformer with Megatron-core's distributed optimizer.

Layers are split by tensor parallelism, tokens by sequence parallelism and Ulysses. What depends on
megatron-core's version is here, in flat_ranges.py and in parallel/. How gradients come about:
- A rank's loss is that of its dp rank's samples, the same on its sp·tp peers. Its gradient is its
  tokens' part of it.
- DDP sums over dp·sp (sp is registered as Megatron's context-parallel axis) and leaves each rank a
  flat range of every bucket, the one whose float32 weights and moments it holds.
- Weights that all tp ranks hold are then summed over tp, of that range only. So the gradient is
  that of loss_sum / denominator of the global batch for every layout.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from megadiff.config.schema import Config
from megadiff.engines.compiling import compile_blocks
from megadiff.engines.flat_ranges import flat_ranges, placement_of, whole_range
from megadiff.engines.gathering import gather_flat
from megadiff.engines.lora import (
    build_adapters,
    check_source,
    is_frozen,
    open_source,
    read_start,
)
from megadiff.engines.microbatch import Batch, ComponentRows
from megadiff.engines.optimizer import build_adamw
from megadiff.engines.sharded import Loss, NonFiniteError, ShardedEngine, Step
from megadiff.models.adapter import ModelAdapter
from megadiff.parallel import megatron_cpu
from megadiff.parallel.lora import Adapters
from megadiff.parallel.mesh import Mesh
from megadiff.parallel.plan import Placement, is_lora
from megadiff.process.garbage import collection_paused
from megadiff.process.versions import MEGATRON_CORE, check_version
from megadiff.tensors.flat_shards import flat_shards
from megadiff.tensors.shards import TRAINED, Shard, ShardFolder
from megadiff.tensors.source_folder import SourceFolder
from megadiff.types import DTYPES, Tensors


class MegatronEngine(ShardedEngine):
    """Train a component whose masters are flat ranges of the weights.

    In float32 they are the weights' own memory, in bfloat16 they lie beside it.
    """

    def __init__(self, config: Config, mesh: Mesh, adapter: ModelAdapter, component: str) -> None:
        """Build the sharded module and load the component of model.path, each rank its shards."""
        _prepare_import()
        # after _prepare_import(), which silences what the import would log
        with collection_paused():
            from megatron.core import parallel_state

            from megadiff.parallel.tensor_parallel import init_parallel_state

        init_parallel_state(mesh)
        self._tp_group = parallel_state.get_tensor_model_parallel_group()
        # tp is the innermost axis of the ranks
        self._is_first_tp = mesh.rank % mesh.tp == 0
        self._is_first_data = mesh.rank // mesh.tp == 0

        source = open_source(config, adapter, component)
        empty = adapter.empty_transformer(component)
        check_source(source, empty, adapter.plan)
        source.read_constants(empty, adapter.plan.constants)
        adapters = build_adapters(
            config, adapter.plan, (name for name, _ in empty.named_parameters())
        )

        transformer = _build_transformer(config, mesh, adapter, empty, source, adapters)
        self._parameters = dict(transformer.named_parameters())
        self._is_outdated = False  # the weights, behind the masters
        frozen = is_frozen(config, component)
        never_trained = adapter.plan.frozen_names(self._parameters)
        trainable = {name: p for name, p in self._parameters.items() if name not in never_trained}
        self._is_mixed = config.engine.dtype != "float32" and not frozen

        if frozen:
            transformer.requires_grad_(False)
            # no update comes: no gradient buffers, and no masters beside the weights
            self._ranges = {name: whole_range(parameter) for name, parameter in trainable.items()}
            optimizer = build_adamw(config.optim, {})
        else:
            self._ddp = _build_ddp(transformer, mesh)
            self._ddp.offload_grad_buffers()  # until an update
            with megatron_cpu.making_optimizer(mesh.device):
                self._distributed = _build_optimizer(config, self._ddp, self._parameters)
            low_rank = {name: p for name, p in self._parameters.items() if is_lora(name)}
            self._ranges = flat_ranges(self._distributed, low_rank or trainable)
            optimizer = self._distributed.optimizer

        if self._is_mixed:
            # again in float32: so far they are copies of the rounded weights
            for name, flat_range in self._ranges.items():
                shards = self._shards(name, flat_range.master.detach())
                read_start(source, name, shards, seed=config.seed)

        super().__init__(
            config,
            mesh,
            adapter,
            component=component,
            transformer=transformer,
            optimizer=optimizer,
            optimized={
                name: flat_range.master
                for name, flat_range in self._ranges.items()
                if self._parameters[name].requires_grad
            },
            masters={name: flat_range.master.detach() for name, flat_range in self._ranges.items()},
            adapters=adapters,
        )

    def load(self, source: ShardFolder) -> None:
        super().load(source)
        for name in self._ranges.keys() - self._optimized.keys():
            # no update will publish a weight that is never trained
            self._ranges[name].weight.copy_(self._ranges[name].master)

    def update(self, batch: Batch, loss: Loss, rows: ComponentRows, *, denominator: float) -> Step:
        """Give the gradient buffers memory for one update: float32 for every local weight.

        They keep it after an error, as freeing waits for reductions that others may never join.
        """
        # zeroed, and of the same storages, so that every main_grad is still a view of them
        self._ddp.restore_grad_buffers()

        try:
            step = super().update(batch, loss, rows, denominator=denominator)
        except NonFiniteError:  # on every rank, after all reductions: the batch may be stepped over
            self._ddp.offload_grad_buffers(empty_cache=False)
            raise
        # the allocator's cache is emptied where replicas want the memory
        self._ddp.offload_grad_buffers(empty_cache=False)

        return step

    def offload(self, *, waits: bool = True) -> None:
        # in this order the copies wait for no other rank
        super().offload(waits=False)
        self._publish()
        if waits:
            super().offload()

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        self._publish()
        yield

    def _microbatch(self, *, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self._ddp.no_sync()

    def _reduced_gradients(self) -> Tensors:
        from megadiff.parallel.regions import sum_over_tp

        self._ddp.finish_grad_sync()
        self._distributed.prepare_grads()
        sum_over_tp(self._optimized.values(), self._tp_group)
        return {
            name: master.grad for name, master in self._optimized.items() if master.grad is not None
        }

    def _drop_gradients(self) -> None:
        super()._drop_gradients()
        for group in self._ddp.bucket_groups:
            # a backward broke off half-way: an assertion of megatron-core's would hide its error
            if len(group.per_param_grad_ready_counts) < len(group.params):
                group.per_param_grad_ready_counts = {}
                group.grad_reduce_handle = None
        self._ddp.zero_grad_buffer()

    def _full_shape(self, name: str) -> Sequence[int]:
        return placement_of(self._parameters[name]).shape

    def _full_weights(self, names: Sequence[str], dtype: torch.dtype) -> list[Tensor]:
        """Gather the weights in use: under bfloat16 the rounded ones, whatever dtype is asked."""
        weights = {name: self._parameters[name].detach() for name in names}
        placements = {name: placement_of(self._parameters[name]) for name in names}
        gathered: Tensors = {}

        if self.mesh.tp > 1:
            split = [name for name in names if placements[name].sharded_dim is not None]
            if split:
                # cast before the gather, which then moves fewer bytes
                flat = [weights[name].reshape(-1) for name in split]
                gathered |= zip(split, gather_flat(flat, dtype, self._tp_group), strict=True)

        return [
            _joined(gathered[name], placements[name])
            if name in gathered
            else weights[name].to(dtype, copy=True)
            for name in names
        ]

    def _shards(self, name: str, values: Tensor) -> list[Shard]:
        placement = placement_of(self._parameters[name])
        box = Shard(
            local=torch.empty(placement.local_shape, device="meta"),
            offsets=placement.offsets,
            shape=placement.shape,
        )
        return flat_shards(values, self._ranges[name].start, box)

    def _is_first_holder(self, name: str) -> bool:
        parameter = self._parameters[name]
        # the distributed optimizer splits what is trained, and leaves out the rest
        is_split_over_data = parameter.requires_grad
        is_split_over_tp = placement_of(parameter).sharded_dim is not None
        return (is_split_over_data or self._is_first_data) and (
            is_split_over_tp or self._is_first_tp
        )

    def _masters_changed(self) -> None:
        self._is_outdated = not self.is_frozen  # a frozen component's masters are the weights

    def _offloadable(self) -> Tensors:
        if not self._is_mixed:
            return super()._offloadable()
        # masters lie beside the weights under bfloat16
        masters = {
            f"{TRAINED}/{self.component}.{name}": master.detach()
            for name, master in self._optimized.items()
        }
        return super()._offloadable() | masters

    def _publish(self) -> None:
        """Copy this rank's masters into the weights and all-gather over dp·sp. Collective."""
        if not self._is_outdated:
            return
        if self._is_mixed:
            trained = [self._ranges[name] for name in self._optimized]
            torch._foreach_copy_(
                [flat_range.weight for flat_range in trained],
                [self._master(name).detach() for name in self._optimized],
            )
        self._ddp.start_param_sync()
        self._is_outdated = False


def _joined(flat_TN: Tensor, placement: Placement) -> Tensor:
    """Join what each tp rank has to the whole tensor."""
    shards = flat_TN.reshape(-1, *placement.local_shape)
    if placement.sharded_dim == 0:
        return shards.flatten(0, 1)
    assert placement.sharded_dim is not None
    return torch.cat(shards.unbind(), placement.sharded_dim)


def check_installed(config: Config) -> None:
    """Raises ValueError for another megatron-core, or where FP8 cannot work."""
    check_version("megatron-core", tested=MEGATRON_CORE)
    if config.engine.fp8 == "none":
        return
    if config.run.device == "cpu" or not torch.cuda.is_available():
        raise ValueError(
            f"engine.fp8={config.engine.fp8} needs an NVIDIA GPU of compute capability 8.9; "
            "set engine.fp8=none"
        )
    from megadiff.parallel.linear import check_transformer_engine

    check_transformer_engine(config.engine.fp8)


def _prepare_import() -> None:
    """Silence megatron-core's notes on optional packages, buckets and torch's older names.

    Transformer Engine reads once, at import, that scales are powers of two: see engines/fp8.py.
    """
    os.environ.setdefault("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES", "1")
    logging.getLogger("megatron").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core\.")
    warnings.filterwarnings(
        "ignore", category=FutureWarning, message=r"`torch\.distributed\.\w+` is deprecated"
    )


def _build_transformer(
    config: Config,
    mesh: Mesh,
    adapter: ModelAdapter,
    empty: nn.Module,
    source: SourceFolder,
    adapters: Adapters | None,
) -> nn.Module:
    """Build the stock module with this rank's shards of the weights, read in engine.dtype."""
    from megadiff.parallel.tensor_parallel import parallelize

    fp8 = "" if config.engine.fp8 == "none" else config.engine.fp8
    budget = config.engine.activation_memory_budget
    # Transformer Engine's layers cut a block into several graphs
    within_blocks = config.engine.compile and not fp8
    compile_all = partial(
        compile_blocks,
        plan=adapter.plan,
        microbatch_size=config.train.microbatch_size,
        budget=budget if within_blocks else 1.0,
        in_one_graph=within_blocks,
    )

    transformer = parallelize(
        empty,
        adapter.plan,
        mesh=mesh,
        attention=adapter.attention,
        dtype=DTYPES[config.engine.dtype],
        sequence_parallel=config.parallel.sequence_parallel,
        activation_memory_budget=1.0 if within_blocks else budget,
        fp8=fp8,
        adapters=adapters,
        compile_blocks=compile_all if config.engine.compile else None,
    )

    for name, parameter in transformer.named_parameters():
        placement = placement_of(parameter)
        shard = Shard(local=parameter.detach(), offsets=placement.offsets, shape=placement.shape)
        read_start(source, name, [shard], seed=config.seed)

    if config.model.float32_streams:
        adapter.keep_streams_in_float32(transformer, DTYPES[config.engine.dtype])
    return transformer


def _build_ddp(transformer: nn.Module, mesh: Mesh):
    """Put the weights and float32 gradients into buffers, reduced while backward still runs."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    # calculate_per_token_loss makes the reduction a plain sum; DDP reads none of the sizes
    config = TransformerConfig(
        num_layers=1,
        hidden_size=mesh.tp,
        num_attention_heads=mesh.tp,
        tensor_model_parallel_size=mesh.tp,
        context_parallel_size=mesh.sp,
        calculate_per_token_loss=True,
    )

    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=True, overlap_grad_reduce=True
    )
    return DistributedDataParallel(config, settings, transformer)


def _build_optimizer(config: Config, ddp, parameters: dict[str, nn.Parameter]):
    """Build the engines' AdamW over this rank's range of the buffers."""
    from megatron.core import parallel_state
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer_config import OptimizerConfig

    dtype = DTYPES[config.engine.dtype]

    return DistributedOptimizer(
        build_adamw(
            config.optim,
            {name: p for name, p in parameters.items() if p.requires_grad},
        ),
        OptimizerConfig(
            optimizer="adam",
            use_distributed_optimizer=True,
            params_dtype=dtype,
            bf16=dtype == torch.bfloat16,
        ),
        # bfloat16 has float32's exponents: there is no loss to scale
        grad_scaler=None,
        init_state_fn=None,
        model_chunks=[ddp],
        per_model_buffers={0: ddp.buffers},
        data_parallel_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        # only megatron-core's own checkpoints would use it
        data_parallel_group_gloo=None,
        data_parallel_group_idx=0,
        distributed_optimizer_instance_id=0,
    )
