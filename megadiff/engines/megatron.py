"""The Megatron engine: the stock diffusers transformer under tensor parallelism, sequence parallelism and Ulysses, with
Megatron-core's gradient buffers and distributed optimizer.

What depends on megatron-core's version is in this file and in parallel/. How gradients come about:
- A rank's loss is that of its dp rank's samples, the same on its sp·tp peers; its gradient is its tokens' part of it.
- DDP sums over dp·sp (sp is registered as Megatron's context-parallel axis) and leaves each rank a flat range of every
  bucket, the one whose float32 weights and moments it holds.
- Weights that all tp ranks hold are then summed over tp, of that range only. So the gradient is that of
  loss_sum / denominator of the global batch for every layout.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megadiff.config.schema import Config
from megadiff.engines.base import Loss, NonFiniteError
from megadiff.engines.gathering import gather_flat
from megadiff.engines.lora import build_adapters, fill_start
from megadiff.engines.microbatch import Batch, Share
from megadiff.engines.optimizer import build_adamw
from megadiff.engines.sharded import ShardedEngine, Step
from megadiff.engines.versions import check_version
from megadiff.models.adapter import ModelAdapter
from megadiff.parallel import megatron_cpu
from megadiff.parallel.lora import Adapters, lora_parameters
from megadiff.parallel.mesh import Mesh, check_heads
from megadiff.parallel.plan import Placement, is_lora
from megadiff.tensors.flat_shards import flat_shards
from megadiff.tensors.shards import TRAINED, Shard, ShardFolder
from megadiff.tensors.source_folder import SourceFolder
from megadiff.types import DTYPES

TESTED_VERSIONS = ("0.16.1",)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What this rank trains of a parameter: elements start … start + numel of the local (tensor-parallel) weight.

    held: 1-D float32, what the optimizer updates. model: the same elements of the weight that forward uses, in
    engine.dtype; they share memory when that is float32. Of an unused weight the piece is all of it, and where they are
    two, `held` is on the CPU. Of what LoRA leaves frozen there is none; of a frozen component they are one, in engine.dtype.
    """

    start: int
    held: Tensor
    model: Tensor


class MegatronEngine(ShardedEngine):
    """The masters are flat ranges of the weights: in float32 of the weights' own memory, in bfloat16 beside it."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        adapter: ModelAdapter,
        *,
        component: str,
        frozen: bool = False,
        keep_reference: bool = False,
        average_decay: float = 0.0,
    ) -> None:
        """Builds the sharded module and loads the component of model.path into it; each rank reads its own pieces only.
        The last three arguments are as in ShardedEngine."""
        check_installed(config)
        _check(mesh, adapter)
        _prepare_import()
        from megatron.core import parallel_state

        from megadiff.parallel.tensor_parallel import init_parallel_state

        init_parallel_state(mesh)
        self._tp_group = parallel_state.get_tensor_model_parallel_group()
        self._is_first_tp, self._is_first_data = mesh.rank % mesh.tp == 0, mesh.rank // mesh.tp == 0
        source = SourceFolder(adapter.model_folder / component)
        empty = adapter.empty_transformer(component)
        source.check_names(
            {name: tuple(parameter.shape) for name, parameter in empty.named_parameters()}
        )
        adapters = build_adapters(
            config, adapter.plan, (name for name, _ in empty.named_parameters())
        )
        transformer = _build_transformer(config, mesh, adapter, empty, source, adapters)
        self._parameters = dict(transformer.named_parameters())
        self._outdated, self._is_frozen = False, frozen
        self._is_mixed = config.engine.dtype != "float32" and not frozen
        if frozen:
            transformer.requires_grad_(False)
            self._pieces = {
                name: _whole_piece(parameter) for name, parameter in self._parameters.items()
            }
            optimizer = build_adamw(config.optim, [])
        else:
            self._ddp = _build_ddp(transformer, mesh)
            self._ddp.offload_grad_buffers()  # until an update
            with megatron_cpu.making_optimizer(mesh.device):
                self._distributed = _build_optimizer(config, self._ddp, self._parameters)
            self._pieces = _pieces(
                self._distributed, lora_parameters(transformer) if adapters else self._parameters
            )
            optimizer = self._distributed.optimizer
        if self._is_mixed:
            self._read_masters(source, seed=config.seed)
        super().__init__(
            config,
            mesh,
            adapter,
            component=component,
            transformer=transformer,
            optimizer=optimizer,
            optimized={
                name: piece.held
                for name, piece in self._pieces.items()
                if self._parameters[name].requires_grad
            },
            masters={name: piece.held.detach() for name, piece in self._pieces.items()},
            adapters=adapters,
            frozen=frozen,
            keep_reference=keep_reference,
            average_decay=average_decay,
        )

    def load(self, source: ShardFolder) -> None:
        super().load(source)
        for name in (
            self._pieces.keys() - self._optimized.keys()
        ):  # never trained, so only now another
            self._pieces[name].model.copy_(self._pieces[name].held)

    def update(self, batch: Batch, loss: Loss, share: Share, *, denominator: float) -> Step:
        """Only meanwhile have the gradient buffers memory, every local weight's gradient in float32. They keep it after an
        error: freeing waits for reductions that other ranks may never join."""
        self._ddp.restore_grad_buffers()  # zeroed; the same storages, so that every main_grad is still a view of them
        try:
            step = super().update(batch, loss, share, denominator=denominator)
        except NonFiniteError:  # on every rank, after all reductions: the batch may be stepped over
            self._ddp.offload_grad_buffers(empty_cache=False)
            raise
        self._ddp.offload_grad_buffers(
            empty_cache=False
        )  # train.replicas.make_room does that, where others want it
        return step

    def offload(self) -> None:
        self._publish()
        super().offload()

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        self._publish()
        yield

    def _microbatch(self, *, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self._ddp.no_sync()

    def _reduced_gradients(self) -> dict[str, Tensor]:
        from megadiff.parallel.regions import sum_over_tp

        self._ddp.finish_grad_sync()
        self._distributed.prepare_grads()
        sum_over_tp(self._optimized.values(), "grad", self._tp_group)
        return {name: held.grad for name, held in self._optimized.items()}

    def _drop_gradients(self) -> None:
        """Also after a backward that broke off half-way, whose error an assertion of megatron-core's would hide."""
        super()._drop_gradients()
        for group in self._ddp.bucket_groups:
            if len(group.per_param_grad_ready_counts) < len(group.params):
                group.per_param_grad_ready_counts, group.grad_reduce_handle = {}, None
        self._ddp.zero_grad_buffer()

    def _full_shape(self, name: str) -> Sequence[int]:
        return self._parameters[name].placement.shape

    def _full_weights(self, names: Sequence[str], dtype: torch.dtype) -> list[Tensor]:
        """Under bfloat16 the rounded weights, in any dtype. Cast before the gather."""
        cut = {
            name
            for name in names
            if self.mesh.tp > 1 and self._parameters[name].placement.sharded_dim is not None
        }
        order = [name for name in names if name in cut]
        pieces = [self._parameters[name].detach().reshape(-1) for name in order]
        gathered = dict(
            zip(order, gather_flat(pieces, dtype, self._tp_group) if order else [], strict=True)
        )
        return [
            _joined(gathered[name], self._parameters[name].placement)
            if name in cut
            else self._parameters[name].detach().to(dtype, copy=True)
            for name in names
        ]

    def _places(self, name: str, piece: Tensor) -> list[Shard]:
        placement = self._parameters[name].placement
        box = Shard(
            local=torch.empty(placement.local_shape, device="meta"),
            offsets=placement.offsets,
            shape=placement.shape,
        )
        return flat_shards(piece, self._pieces[name].start, box)

    def _is_first_holder(self, name: str) -> bool:
        parameter = self._parameters[name]
        is_split_over_data = (
            parameter.requires_grad
        )  # the distributed optimizer leaves out what is never trained
        is_split_over_tp = parameter.placement.sharded_dim is not None
        return (is_split_over_data or self._is_first_data) and (
            is_split_over_tp or self._is_first_tp
        )

    def _masters_changed(self) -> None:
        self._outdated = not self._is_frozen  # whose masters are the weights

    def _offloadable(self) -> dict[str, Tensor]:
        """Under bfloat16 also the masters, which lie beside the weights."""
        if not self._is_mixed:
            return super()._offloadable()
        masters = {
            f"{TRAINED}/{self.component}.{name}": held.detach()
            for name, held in self._optimized.items()
        }
        return super()._offloadable() | masters

    def _publish(self) -> None:
        """Masters → this rank's part of the weights → all-gather over dp·sp. Collective; nothing when they are current."""
        if not self._outdated:
            return
        if self._is_mixed:
            trained = [self._pieces[name] for name in self._optimized]
            torch._foreach_copy_(
                [piece.model for piece in trained], [piece.held.detach() for piece in trained]
            )
        self._ddp.start_param_sync()
        self._outdated = False

    def _read_masters(self, source: SourceFolder, *, seed: int) -> None:
        """In float32, of which the weights in engine.dtype are a rounding."""
        for name, piece in self._pieces.items():
            shards = self._places(name, piece.held.detach())
            if is_lora(name):
                fill_start(name, shards, seed=seed)
                continue
            for shard in shards:
                source.read_into(name, shard)


def _joined(pieces_TN: Tensor, placement: Placement) -> Tensor:
    """The whole tensor of what each tp rank has of it."""
    parts = pieces_TN.reshape(-1, *placement.local_shape)
    if placement.sharded_dim == 0:
        return parts.flatten(0, 1)
    return torch.cat(parts.unbind(), placement.sharded_dim)


def check_installed(config: Config) -> None:
    """Raises ValueError, before anything is started, for another megatron-core or where FP8 cannot work."""
    check_version("megatron-core", tested=TESTED_VERSIONS)
    if config.engine.fp8 == "none":
        return
    if config.run.device == "cpu" or not torch.cuda.is_available():
        raise ValueError(
            f"engine.fp8={config.engine.fp8} needs an NVIDIA GPU of compute capability 8.9; set engine.fp8=none"
        )
    from megadiff.parallel.linear import check_transformer_engine

    check_transformer_engine(config.engine.fp8)


def _check(mesh: Mesh, adapter: ModelAdapter) -> None:
    if mesh.dp_replicate > 1:
        raise ValueError(
            f"parallel.dp_replicate={mesh.dp_replicate}: this engine holds whole weights on every dp rank and splits the "
            "optimizer over all of them; set parallel.dp_replicate=1, or engine.backend=veomni"
        )
    check_heads(adapter.num_heads, sp=mesh.sp, tp=mesh.tp)


def _prepare_import() -> None:
    """It warns of what it would use if there were, lists all parameters of all buckets, and uses torch's older names."""
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
    """The stock module with this rank's pieces of the weights, read in engine.dtype."""
    from megadiff.parallel.tensor_parallel import parallelize

    transformer = parallelize(
        empty,
        adapter.plan,
        mesh=mesh,
        attention=adapter.attention,
        dtype=DTYPES[config.engine.dtype],
        sequence_parallel=config.parallel.sequence_parallel,
        activation_memory_budget=config.engine.activation_memory_budget,
        fp8="" if config.engine.fp8 == "none" else config.engine.fp8,
        adapters=adapters,
    )
    for name, parameter in transformer.named_parameters():
        place = parameter.placement
        shard = Shard(local=parameter.detach(), offsets=place.offsets, shape=place.shape)
        if is_lora(name):
            fill_start(name, [shard], seed=config.seed)
        else:
            source.read_into(name, shard)
    if config.model.float32_streams:
        adapter.keep_streams_in_float32(transformer, DTYPES[config.engine.dtype])
    return transformer


def _build_ddp(transformer: nn.Module, mesh: Mesh):
    """megatron-core's contiguous weights and float32 gradients, reduced while backward still runs.

    calculate_per_token_loss makes its reduction a plain sum; of its config's sizes nothing is read here.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

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
    """The engines' AdamW, over this rank's range of the buffers."""
    from megatron.core import parallel_state
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer_config import OptimizerConfig

    dtype = DTYPES[config.engine.dtype]
    return DistributedOptimizer(
        build_adamw(
            config.optim,
            (parameter for parameter in parameters.values() if parameter.requires_grad),
        ),
        OptimizerConfig(
            optimizer="adam",
            use_distributed_optimizer=True,
            params_dtype=dtype,
            bf16=dtype == torch.bfloat16,
        ),
        grad_scaler=None,
        init_state_fn=None,
        model_chunks=[ddp],
        per_model_buffers={0: ddp.buffers},
        data_parallel_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        data_parallel_group_gloo=None,
        data_parallel_group_idx=0,
        distributed_optimizer_instance_id=0,
    )


def _whole_piece(parameter: nn.Parameter) -> Piece:
    """All of a local weight, not copied."""
    flat = parameter.detach().view(-1)
    return Piece(start=0, held=flat, model=flat)


def _pieces(distributed, parameters: dict[str, nn.Parameter]) -> dict[str, Piece]:
    """name → this rank's piece, in the order of the parameters; those that lie in other ranks' ranges are left out."""
    groups = (
        (distributed.model_fp32_groups, distributed.shard_fp32_groups),
        (distributed.model_float16_groups, distributed.shard_fp32_from_float16_groups),
    )
    held = {
        parameter: shard
        for model_groups, shard_groups in groups
        for model_group, shard_group in zip(model_groups, shard_groups, strict=True)
        for parameter, shard in zip(model_group, shard_group, strict=True)
    }
    pieces = {}
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            piece = _whole_piece(parameter)
            is_master = piece.held.dtype == torch.float32
            pieces[name] = (
                piece if is_master else replace(piece, held=piece.held.to("cpu", torch.float32))
            )
        elif parameter in held:
            flat = parameter.detach().view(-1)
            start = distributed._get_model_param_range_map(parameter)["param"].start
            shard = held[parameter]
            shard.placement = parameter.placement
            pieces[name] = Piece(start=start, held=shard, model=flat[start : start + shard.numel()])
    return pieces
