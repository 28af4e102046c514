"""The VeOmni engine: FSDP2 / HSDP over dp and Ulysses over sp, for all weights or for LoRA.

The module is VeOmni's own. Where that is wrong under Ulysses (ModelAdapter.veomni_splits_tokens) it
is diffusers' own, with its tokens split by megadiff.parallel. All that depends on VeOmni's version
is in this file. Two habits matter to callers:
- VeOmni replaces diffusers' `QwenImageTransformer2DModel.forward` in the whole process. A
  plain-diffusers reference belongs in another process.
- FSDP2 averages gradients over dp·sp ranks. Under Ulysses every sp rank computes the whole loss.
  The backward of VeOmni's gather sums over sp, so that the average is the mean over dp. That of
  ours takes a rank's own part, so the average has to be multiplied by sp as well. gradient_scale
  makes it the gradient of loss_sum / denominator of the global batch for every layout.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from megadiff.config.schema import Config
from megadiff.engines.compiling import compile_blocks
from megadiff.engines.dtensors import full_weight, holds_first, row_group, shard_of
from megadiff.engines.fp8 import check_torchao, multiply_in_fp8
from megadiff.engines.gathering import gather_rows, local
from megadiff.engines.lora import (
    build_adapters,
    check_source,
    is_frozen,
    open_source,
    read_start,
)
from megadiff.engines.optimizer import build_adamw
from megadiff.engines.sharded import ShardedEngine
from megadiff.engines.shared_base import WithheldBase, build_base, shares_base
from megadiff.models.adapter import ModelAdapter
from megadiff.parallel.collectives import all_reduce_max
from megadiff.parallel.lora import Adapters, adapt_linears
from megadiff.parallel.mesh import Mesh
from megadiff.parallel.plan import is_lora
from megadiff.parallel.recompute import recompute_blocks
from megadiff.process.garbage import collection_paused
from megadiff.process.versions import MEGATRON_CORE, VEOMNI, check_version
from megadiff.sync.shared_base import SharedBase
from megadiff.tensors.shards import Shard
from megadiff.types import DTYPES, Tensors

if TYPE_CHECKING:  # needs megatron-core
    from megadiff.parallel.attention import TokenAxes

logger = logging.getLogger(__name__)

# fused kernels that a diffusion transformer does not use; VeOmni wants a choice for each
LANGUAGE_MODEL_OPS = (
    "moe",
    "cross_entropy_loss",
    "rms_norm",
    "swiglu_mlp",
    "rotary_pos_emb",
    "rotary_pos_emb_vision",
    "load_balancing_loss",
    "rms_norm_gated",
    "causal_conv1d",
    "chunk_gated_delta_rule",
)
# of the device's memory, that whole weights and gradients may take between microbatches
UNSHARDED_SHARE = 0.25


class VeOmniEngine(ShardedEngine):
    """Train a component whose masters are FSDP2's own shards.

    FSDP2 gathers them, cast to engine.dtype, around forward and backward. Frozen weights are held
    in engine.dtype.
    """

    def __init__(self, config: Config, mesh: Mesh, adapter: ModelAdapter, component: str) -> None:
        """Build the sharded module and load the component of model.path, each rank its shards."""
        transformer, adapters, self.shared_base = _build_transformer(
            config, mesh, adapter, component
        )
        # whole on this rank, and none of FSDP2's
        self._base: Tensors = self.shared_base.tensors if self.shared_base else {}
        self._parameters: dict[str, DTensor] = {
            name: parameter  # type: ignore[misc]  # FSDP2 makes DTensors of them
            for name, parameter in transformer.named_parameters()
            if name not in self._base
        }
        low_rank = {name: p for name, p in self._parameters.items() if is_lora(name)}
        source = open_source(config, adapter, component)
        check_source(source, transformer, adapter.plan)
        source.read_constants(transformer, adapter.plan.constants)

        for name, parameter in self._parameters.items():
            shard = shard_of(parameter, local(parameter))
            read_start(source, name, [shard], seed=config.seed)
        for name, tensor in self._base.items():
            read_start(source, name, [shard_of(tensor, tensor)], seed=config.seed)

        never_trained = adapter.plan.frozen_names(self._parameters)
        masters = low_rank or {
            name: p for name, p in self._parameters.items() if name not in never_trained
        }
        trained = {} if is_frozen(config, component) else masters

        self._fsdp_modules = [
            module for module in transformer.modules() if isinstance(module, FSDPModule)
        ]
        self._sync_every_microbatch = _too_large(self._parameters, config.engine.dtype, mesh)
        self._are_whole = False  # all weights, from one microbatch to the next
        self.gradient_scale = mesh.dp if adapter.veomni_splits_tokens else mesh.dp * mesh.sp

        super().__init__(
            config,
            mesh,
            adapter,
            component=component,
            transformer=transformer,
            optimizer=build_adamw(config.optim, trained),
            optimized=trained,
            masters={name: local(parameter.detach()) for name, parameter in masters.items()},
            adapters=adapters,
        )

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._drop_unsharded()

    @contextmanager
    def _microbatch(self, *, last: bool) -> Iterator[None]:
        """Reduce gradients and free gathered weights after the last backward only, if they fit.

        Each update then gathers the weights once. FSDP2 keeps the root's from forward to backward
        anyway. Of guidance's two last backwards one reduces all before, the other its own.
        """
        sync = last or self._sync_every_microbatch
        keeps = self._are_whole or not sync

        for module in self._fsdp_modules:
            module.set_requires_gradient_sync(sync, recurse=False)
            module.set_reshard_after_backward(not keeps, recurse=False)
        self._reshard_after_forward(not keeps)

        try:
            yield
        finally:
            self._are_whole = not sync
            self._reshard_after_forward(True)

        if last and keeps:
            self._drop_unsharded()

    def _reshard_after_forward(self, reshard: bool) -> None:
        # the root comes first; FSDP2 keeps it whole from forward to backward anyway
        for module in self._fsdp_modules[1:]:
            module.set_reshard_after_forward(reshard, recurse=False)

    def _reduced_gradients(self) -> dict[str, Tensor]:
        return {name: local(p.grad) for name, p in self._parameters.items() if p.grad is not None}

    def _full_shape(self, name: str) -> Sequence[int]:
        return self._base[name].shape if name in self._base else self._parameters[name].shape

    def _full_weights(self, names: Sequence[str], dtype: torch.dtype) -> list[Tensor]:
        if self._base.keys() >= set(names):
            return [self._base[name] for name in names]
        parameters = [self._parameters[name] for name in names]
        if group := row_group(parameters):
            shards = [local(parameter.detach()) for parameter in parameters]
            return gather_rows(shards, [parameter.shape for parameter in parameters], dtype, group)
        return [full_weight(parameter, dtype) for parameter in parameters]

    def _shards(self, name: str, values: Tensor) -> list[Shard]:
        return [shard_of(self._parameters[name], values)]

    def _is_first_holder(self, name: str) -> bool:
        return holds_first(self._parameters[name])

    def _masters_changed(self) -> None:
        self._drop_unsharded()

    def _drop_unsharded(self) -> None:
        """Free gathered weights. FSDP2 keeps the root's after a lone forward, stale or not."""
        self._are_whole = False
        for module in self._fsdp_modules:
            module.reshard()


def check_installed(config: Config) -> None:
    """Raises ValueError, before anything is started, for another VeOmni, or a GPU not meant."""
    check_version("veomni", tested=VEOMNI)
    check_torchao(config)
    if config.run.device == "cpu" and torch.cuda.is_available():
        raise ValueError(
            "run.device=cpu, but VeOmni takes the GPU that it sees; "
            "set CUDA_VISIBLE_DEVICES= as well"
        )


def _build_transformer(
    config: Config, mesh: Mesh, adapter: ModelAdapter, component: str
) -> tuple[nn.Module, Adapters | None, SharedBase | None]:
    """Build the module under FSDP2 with uninitialised weights: float32 masters, engine.dtype math.

    The plan's blocks are the units that FSDP2 gathers. The module's forward pads and masks lengths
    that sp does not divide. A world of one takes the same path.
    """
    _prepare_library(mesh)
    plan = adapter.plan
    is_veomnis = adapter.veomni_splits_tokens
    dtype = DTYPES[config.engine.dtype]
    if is_veomnis:
        model = _veomni_module(adapter.model_folder / component)
    else:
        model = adapter.empty_transformer(component)

    adapters = build_adapters(config, plan, (name for name, _ in model.named_parameters()))
    parameters = dict(model.named_parameters())
    is_whole = bool(adapters) or is_frozen(config, component)

    for name in parameters if is_whole else plan.frozen_names(parameters):
        # frozen weights need no float32 masters
        parameters[name].data = parameters[name].data.to(dtype)
        parameters[name].requires_grad_(False)
    if config.engine.fp8 != "none":
        multiply_in_fp8(model, plan, scaling=config.engine.fp8, device=mesh.device)
    if adapters:  # last: LoRA's class is made from the layer's
        adapt_linears(model, adapters)

    if is_veomnis:
        adapter.adapt_veomni_module(model)
    else:
        _split_tokens(model, adapter, mesh, dtype)

    budget = config.engine.activation_memory_budget
    if config.model.float32_streams:
        adapter.keep_streams_in_float32(model, dtype)

    # Ulysses' exchanges cut a block into several graphs
    within_blocks = config.engine.compile and mesh.sp == 1
    if not within_blocks:
        recompute_blocks(model, plan, budget=budget)

    sharded, shared_base = _shard_weights(model, config, mesh, adapter)
    if config.engine.compile:
        compile_blocks(
            sharded,
            plan,
            microbatch_size=config.train.microbatch_size,
            budget=budget if within_blocks else 1.0,
        )

    return sharded.train(), adapters, shared_base


def _shard_weights(
    model: nn.Module, config: Config, mesh: Mesh, adapter: ModelAdapter
) -> tuple[nn.Module, SharedBase | None]:
    """Let FSDP2 take the parameters over, but for a base that replicas map, which stays whole."""
    from veomni.arguments import MixedPrecisionConfig
    from veomni.distributed.torch_parallelize import parallelize_model_fsdp2

    mixed = MixedPrecisionConfig(
        enable=config.engine.dtype != "float32",
        param_dtype=config.engine.dtype,
        reduce_dtype="float32",
        # FSDP2 would also round timesteps, which go up to 1000 (978 to 976), and streams
        cast_forward_inputs=adapter.veomni_splits_tokens and not config.model.float32_streams,
    )

    is_shared = shares_base(
        config, adapter, device_type=mesh.device.type, world_size=mesh.world_size
    )
    withheld = WithheldBase(model) if is_shared else None
    modules = model.named_modules()
    units = {type(module).__name__ for name, module in modules if adapter.plan.is_block(name)}
    sharded = parallelize_model_fsdp2(
        model,
        mixed_precision=mixed,
        basic_modules=sorted(units),
        # each rank reads its own shards later, with read_start()
        should_skip_hf_weight_load=True,
        init_device="meta",
    )
    if withheld is None:
        return sharded, None

    base = build_base(withheld, adapter, dtype=DTYPES[config.engine.dtype], device=mesh.device)
    withheld.put_back(sharded, base)
    return sharded, base


def _veomni_module(folder: Path) -> nn.Module:
    """Build VeOmni's own class of the model, with its weights on the meta device."""
    from veomni.arguments import OpsImplementationConfig
    from veomni.models import build_foundation_model

    ops = OpsImplementationConfig(
        attn_implementation="eager",
        **{f"{name}_implementation": "eager" for name in LANGUAGE_MODEL_OPS},
    )

    return build_foundation_model(
        config_path=str(folder),
        weights_path=str(folder),
        torch_dtype="float32",
        init_device="meta",
        ops_implementation=ops,
    )


def _split_tokens(model: nn.Module, adapter: ModelAdapter, mesh: Mesh, dtype: torch.dtype) -> None:
    """Split tokens over sp, and cast features, which FSDP2 would do only with the timesteps."""
    check_version("megatron-core", tested=MEGATRON_CORE)  # whose collectives split them
    from megadiff.parallel.tokens import split_tokens

    split_tokens(model, adapter.plan, _axes(mesh), adapter.attention)
    split = model.forward

    def forward(**inputs: Any) -> Any:
        features = inputs.keys() & set(adapter.plan.features)
        return split(**inputs | {name: _cast(inputs[name], dtype) for name in features})

    model.forward = forward


def _cast(feature: Tensor | list[Tensor], dtype: torch.dtype) -> Tensor | list[Tensor]:
    if isinstance(feature, list):
        return [tensor.to(dtype) for tensor in feature]
    return feature.to(dtype)


@cache
def _axes(mesh: Mesh) -> TokenAxes:
    """Make the process groups of Ulysses once, for all components."""
    from megadiff.parallel.tokens import ulysses_axes

    return ulysses_axes(mesh)


def _prepare_library(mesh: Mesh) -> None:
    """Import VeOmni without its notes, and tell it the layout."""
    os.environ.setdefault("VEOMNI_VERBOSITY", "ERROR")  # read once, at import

    if mesh.device.type == "cpu" and not hasattr(torch.cpu, "empty_cache"):
        # VeOmni calls it on whatever device it finds
        torch.cpu.empty_cache = lambda: None  # type: ignore[attr-defined]  # that is why
    # All that is used here: a rank's start waits for it.
    with collection_paused():
        import veomni.distributed.torch_parallelize
        import veomni.models  # noqa: F401
        from veomni.distributed.parallel_state import init_parallel_state, set_parallel_state

    state = init_parallel_state(
        dp_size=mesh.dp,
        dp_replicate_size=mesh.dp_replicate,
        dp_shard_size=mesh.dp // mesh.dp_replicate,
        ulysses_size=mesh.sp,
        dp_mode="fsdp2",
        device_type=mesh.device.type,
        name=None,
    )
    set_parallel_state(state)


def unsharded_bytes(*, num_elements: int, num_trained: int, itemsize: int) -> int:
    """Count what a rank holds between syncs: whole weights in engine.dtype, float32 gradients."""
    return num_elements * itemsize + num_trained * 4


def _too_large(parameters: dict[str, DTensor], dtype: str, mesh: Mesh) -> bool:
    """Tell whether some rank cannot hold all between microbatches. Collective: GPUs may differ."""
    if mesh.device.type == "cpu":
        return False

    num_bytes = unsharded_bytes(
        num_elements=sum(p.numel() for p in parameters.values()),
        num_trained=sum(p.numel() for p in parameters.values() if p.requires_grad),
        itemsize=DTYPES[dtype].itemsize,
    )
    limit = UNSHARDED_SHARE * torch.cuda.get_device_properties(mesh.device).total_memory
    shares = all_reduce_max({"of_limit": num_bytes / limit}, mesh.cpu_group)
    if shares["of_limit"] <= 1:
        return False

    gib = num_bytes / 2**30
    logger.info("gradients are reduced after every microbatch: %.1f GiB would not fit", gib)
    return True
