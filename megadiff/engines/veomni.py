"""The VeOmni engine: full-parameter training with FSDP2 / HSDP over dp and Ulysses over sp.

All that depends on VeOmni's version is in this file. Two of its habits matter to callers:
- It replaces diffusers' `QwenImageTransformer2DModel.forward` in the whole process. A plain-diffusers reference belongs
  in another process.
- FSDP2 averages gradients over dp·sp ranks. Under Ulysses every sp rank computes the whole loss and the gather's
  backward sums over sp, so that average is the mean over dp. Hence the factor dp in `update`: the gradient is that of
  loss_sum / denominator of the global batch for every layout.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from megadiff.config.schema import Config
from megadiff.diffusion import sde
from megadiff.engines.base import Loss
from megadiff.engines.microbatch import Batch, FlowMicrobatch, Microbatch, loss_inputs, microbatches, num_microbatches
from megadiff.models.adapter import ModelAdapter
from megadiff.parallel.collectives import all_reduce_sums
from megadiff.parallel.mesh import Mesh
from megadiff.types import DTYPES, LogProbs, TrainBatch
from megadiff.weights.shards import AVERAGED, TRAINED, Shard, ShardFolder, SourceFolder, write_shards

logger = logging.getLogger(__name__)

TESTED_VERSIONS = ("0.1.12",)
LANGUAGE_MODEL_OPS = (  # fused kernels that a diffusion transformer does not use; VeOmni wants a choice for each
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
MOMENTS = ("exp_avg", "exp_avg_sq")
UNSHARDED_SHARE = 0.25  # of the device's memory, that full-size gradients may take between microbatches


class VeOmniEngine:
    """Fulfils engines.base.Engine for models with one trained component. Collective: all ranks make the same calls."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        adapter: ModelAdapter,
        *,
        keep_reference: bool = False,
        average_decay: float = 0.0,
    ) -> None:
        """Builds the sharded module and loads model.path into it; each rank reads its own shards only.

        keep_reference: hold the weights of step 0 on the CPU, which reference() needs. average_decay: of the running
        average of the weights, which is sharded as they are; 0 keeps none.
        """
        _check(config, mesh, adapter)
        self.config, self.mesh, self.adapter = config, mesh, adapter
        self.component = adapter.components[0]
        self.transformer = _build_transformer(config, mesh, adapter.model_folder / self.component)
        self._fsdp_modules = [module for module in self.transformer.modules() if isinstance(module, FSDPModule)]
        self._parameters: dict[str, DTensor] = dict(self.transformer.named_parameters())
        _load_source(self._parameters, adapter.model_folder / self.component)
        self.optimizer = _build_optimizer(config, self._parameters)
        self._sync_every_microbatch = _gradients_too_large(self._parameters, mesh.device)
        self._offloaded: list[tuple[Tensor, Tensor]] = []
        self._num_updates = 0
        self._reference = None
        if keep_reference:
            self._reference = [_local(p).to("cpu", copy=True) for p in self._parameters.values()]
        self._average_decay = average_decay
        self._average: dict[str, DTensor] = {}
        if average_decay:
            self._average = {name: p.detach().clone() for name, p in self._parameters.items()}

    def log_probs(self, batch: TrainBatch) -> LogProbs:
        sampling, size = batch.sampling, self.config.train.microbatch_size
        log_probs_NW = torch.empty(batch.old_log_probs_NW.shape, dtype=torch.float64)
        means_NWLC = torch.empty(*log_probs_NW.shape, *batch.latents_NSLC.shape[2:])
        with torch.no_grad():
            for piece in microbatches(batch, size, self.mesh.device):
                sigmas = (piece.sigma_B, piece.sigma_next_B)
                step = dict(schedule=batch.schedule, eta=sampling.eta)
                velocity_BLC = self._velocity(batch, piece)
                mean_BLC = sde.step_mean(sampling.sde_type, piece.latents_BLC, velocity_BLC, *sigmas, **step)
                log_prob_B = sde.log_prob(sampling.sde_type, piece.prev_sample_BLC, mean_BLC, *sigmas, **step)
                log_probs_NW[piece.sample_B, piece.step_B] = log_prob_B.cpu()
                means_NWLC[piece.sample_B, piece.step_B] = mean_BLC.cpu()
        self._drop_unsharded()
        return LogProbs(log_probs_NW=log_probs_NW, means_NWLC=means_NWLC)

    def update(self, batch: Batch, loss: Loss) -> dict[str, float]:
        """Raises FloatingPointError on every rank, with the weights as they were, when the gradient is not finite."""
        size = self.config.train.microbatch_size
        denominator = batch.denominator or 1.0  # 0: every weight is 0, and so is every sum
        totals: dict[str, Tensor] = {}
        for index, piece in enumerate(microbatches(batch, size, self.mesh.device)):
            self._set_gradient_sync(index == num_microbatches(batch, size) - 1)
            output = loss(loss_inputs(batch, piece, self._velocity(batch, piece)))
            (output.loss_sum * (self.mesh.dp / denominator)).backward()
            for name, value in output.sums.items():
                totals[name] = totals.get(name, 0) + value
        grad_norm = self._clip_gradients(self.config.optim.max_grad_norm)
        lr = self._set_learning_rate()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._num_updates += 1
        self._update_average()
        self._drop_unsharded()
        sums = all_reduce_sums({name: float(value) for name, value in totals.items()}, self.mesh.dp_group)
        figures = {name: value / denominator for name, value in sums.items()}
        return figures | {"optim/grad_norm": grad_norm, "optim/lr": lr}

    def named_weights(self, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        """Cast before the gather, which then moves half the bytes. The tensors are the receiver's own."""
        dtype = DTYPES[self.config.model.dtype]
        bucket: list[tuple[str, Tensor]] = []
        num_bytes = 0
        for name, parameter in self._parameters.items():
            tensor = parameter.detach().to(dtype).full_tensor()
            if tensor.data_ptr() == _local(parameter).data_ptr():  # not sharded and not cast: still the policy's memory
                tensor = tensor.clone()
            if bucket and num_bytes + tensor.nbytes > bucket_bytes:
                yield bucket
                bucket, num_bytes = [], 0
            bucket.append((f"{self.component}.{name}", tensor))
            num_bytes += tensor.nbytes
        if bucket:
            yield bucket

    @contextmanager
    def reference(self) -> Iterator[None]:
        if self._reference is None:
            raise ValueError("this engine keeps no reference weights; build it with keep_reference=True (kl_coef > 0)")
        self._swap(self._reference)
        try:
            yield
        finally:
            self._swap(self._reference)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        held = [_local(average) for average in self._average.values()]
        self._swap(held)
        try:
            yield
        finally:
            self._swap(held)

    def save(self, folder: Path) -> None:
        """One file a rank: its shards of the float32 weights and AdamW's moments. Replicas are written once."""
        tensors = {**self._weights(), **self._averages(), **self._moments()}
        shards = {name: _shard(tensor) for name, tensor in tensors.items() if _is_writer(tensor)}
        values = {"optimizer_steps": self._num_updates}
        write_shards(folder, shards, rank=self.mesh.rank, num_files=self.mesh.world_size, values=values)

    def load(self, folder: Path) -> None:
        """Bit exact under any layout and world size. Raises ValueError that names what is torn: the file and tensor."""
        source = ShardFolder(folder)
        self._check_average(source)
        self._create_moments(source)
        for name, tensor in {**self._weights(), **self._averages(), **self._moments()}.items():
            source.read_into(name, _shard(tensor))
        self._num_updates = int(source.values["optimizer_steps"])
        self._drop_unsharded()

    def offload(self) -> None:
        """Gradients exist only within update(), so the optimizer's moments are all there is to move."""
        if self.mesh.device.type == "cpu" or self._offloaded:
            return
        for moment in self._moments().values():
            local = _local(moment)
            self._offloaded.append((local, local.to("cpu", copy=True)))
            local.untyped_storage().resize_(0)
        torch.cuda.empty_cache()

    def onload(self) -> None:
        for local, host in self._offloaded:
            local.untyped_storage().resize_(host.untyped_storage().nbytes())
            local.copy_(host)
        self._offloaded.clear()

    def _velocity(self, batch: Batch, piece: Microbatch | FlowMicrobatch) -> Tensor:
        return self.adapter.velocity(
            self.transformer, piece.latents_BLC, piece.sigma_B, piece.conditioning, batch.sampling
        )

    def _set_gradient_sync(self, last: bool) -> None:
        """Reduce gradients and free the gathered weights only after the last backward, where memory allows."""
        sync = last or self._sync_every_microbatch
        for module in self._fsdp_modules:
            module.set_requires_gradient_sync(sync, recurse=False)
            module.set_reshard_after_backward(sync, recurse=False)

    def _drop_unsharded(self) -> None:
        """Free gathered weights. FSDP2 keeps the root's after a forward without backward, stale or not."""
        for module in self._fsdp_modules:
            module.reshard()

    def _clip_gradients(self, max_norm: float) -> float:
        """Norm over all parameters before clipping, equal on every rank."""
        gradients = [_local(p.grad) for p in self._parameters.values() if p.grad is not None]
        squared = torch.nn.utils.get_total_norm(gradients).float().square()
        for group in _shard_groups(next(iter(self._parameters.values()))):
            dist.all_reduce(squared, group=group)
        norm = squared.sqrt()
        if not torch.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            raise FloatingPointError(f"gradient norm is {norm.item()}; the weights were left as they were")
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm.item()

    def _set_learning_rate(self) -> float:
        """Linear warm-up over optim.warmup_steps, then constant."""
        optim = self.config.optim
        lr = optim.lr * min(1.0, (self._num_updates + 1) / max(optim.warmup_steps, 1))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def _update_average(self) -> None:
        """Decay rises to its value as (1 + n) / (10 + n), so that the start is soon forgotten."""
        if self._average:
            decay = min(self._average_decay, (1 + self._num_updates) / (10 + self._num_updates))
            averages = [_local(average) for average in self._average.values()]
            torch._foreach_lerp_(averages, [_local(p) for p in self._parameters.values()], 1 - decay)

    def _swap(self, others: list[Tensor]) -> None:
        """Exchange the policy's weights with others' (this rank's pieces, on any device) in place, one tensor at a time."""
        self._drop_unsharded()
        for parameter, held in zip(self._parameters.values(), others, strict=bool(others)):
            local = _local(parameter)
            policy = local.to(held.device, copy=True)
            local.copy_(held)
            held.copy_(policy)

    def _weights(self) -> dict[str, DTensor]:
        return {f"{TRAINED}/{self.component}.{name}": p.detach() for name, p in self._parameters.items()}

    def _averages(self) -> dict[str, DTensor]:
        return {f"{AVERAGED}/{self.component}.{name}": average for name, average in self._average.items()}

    def _moments(self) -> dict[str, DTensor]:
        """AdamW's moments, of the parameters that have had a gradient: a last block's unused branch never has."""
        states = ((name, self.optimizer.state.get(p)) for name, p in self._parameters.items())
        return {f"optim/{kind}/{self.component}.{name}": s[kind] for name, s in states if s for kind in MOMENTS}

    def _check_average(self, source: ShardFolder) -> None:
        has_average = any(name.startswith(f"{AVERAGED}/") for name in source.shapes)
        if has_average != bool(self._average):  # it would be lost, or made up
            raise ValueError(
                f"{source.folder} has {'' if has_average else 'no '}averaged weights, but algorithm.ema_decay="
                f"{self._average_decay}; set it as it was, or start a new run"
            )

    def _create_moments(self, source: ShardFolder) -> None:
        """Empty optimizer state for just the parameters that the checkpoint has moments of."""
        assert not self._offloaded, "load() while offloaded"
        steps = float(source.values["optimizer_steps"])
        self.optimizer.state.clear()
        for name, parameter in self._parameters.items():
            if f"optim/{MOMENTS[0]}/{self.component}.{name}" in source.shapes:
                moments = {kind: torch.zeros_like(parameter.detach()) for kind in MOMENTS}
                step = torch.tensor(steps, dtype=torch.float32, device=self.mesh.device)
                self.optimizer.state[parameter] = {"step": step, **moments}


def _check(config: Config, mesh: Mesh, adapter: ModelAdapter) -> None:
    version = importlib.metadata.version("veomni")
    if version not in TESTED_VERSIONS:
        raise ValueError(f"veomni {version} is none of {', '.join(TESTED_VERSIONS)}, on which this engine was tested")
    if mesh.tp > 1:
        raise ValueError(
            f"parallel.tp={mesh.tp}: VeOmni accepts a tensor-parallel size for diffusion transformers and ignores it; "
            "set parallel.tp=1 and use parallel.sp or more parallel.dp"
        )
    if adapter.num_heads % mesh.sp:
        raise ValueError(
            f"parallel.sp={mesh.sp} does not divide the model's {adapter.num_heads} attention heads, which Ulysses "
            "splits; set parallel.sp to a divisor"
        )
    if len(adapter.components) != 1:
        raise ValueError(f"this engine trains one component, the model has {adapter.components}")
    if mesh.device.type == "cpu" and torch.cuda.is_available():
        raise ValueError("run.device=cpu, but VeOmni takes the GPU that it sees; set CUDA_VISIBLE_DEVICES= as well")


def _build_transformer(config: Config, mesh: Mesh, folder: Path) -> nn.Module:
    """VeOmni's module under FSDP2 with uninitialised weights: float32 masters, compute in engine.dtype.

    Lengths that sp does not divide are padded and masked by its forward. A world of one takes the same path.
    """
    _prepare_import(mesh)
    from veomni.arguments import MixedPrecisionConfig, OpsImplementationConfig
    from veomni.distributed.parallel_state import init_parallel_state, set_parallel_state
    from veomni.distributed.torch_parallelize import parallelize_model_fsdp2
    from veomni.models import build_foundation_model

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
    ops = OpsImplementationConfig(
        attn_implementation="eager", **{f"{name}_implementation": "eager" for name in LANGUAGE_MODEL_OPS}
    )
    model = build_foundation_model(
        config_path=str(folder),
        weights_path=str(folder),
        torch_dtype="float32",
        init_device="meta",
        ops_implementation=ops,
    )
    if config.engine.recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    mixed = MixedPrecisionConfig(
        enable=config.engine.dtype != "float32", param_dtype=config.engine.dtype, reduce_dtype="float32"
    )
    return parallelize_model_fsdp2(
        model, mixed_precision=mixed, should_skip_hf_weight_load=True, init_device="meta"
    ).train()


def _prepare_import(mesh: Mesh) -> None:
    os.environ.setdefault("VEOMNI_VERBOSITY", "ERROR")  # read once, at import
    if mesh.device.type == "cpu" and not hasattr(torch.cpu, "empty_cache"):
        torch.cpu.empty_cache = lambda: None  # VeOmni calls it on whatever device it finds


def _load_source(parameters: dict[str, DTensor], folder: Path) -> None:
    source = SourceFolder(folder)
    source.check_names({name: tuple(p.shape) for name, p in parameters.items()})
    for name, parameter in parameters.items():
        source.read_into(name, _shard(parameter.detach()))


def _build_optimizer(config: Config, parameters: dict[str, DTensor]) -> torch.optim.AdamW:
    """AdamW without weight decay on biases, norms and other 1-D parameters."""
    optim = config.optim
    groups = [
        {"params": [p for p in parameters.values() if p.ndim > 1], "weight_decay": optim.weight_decay},
        {"params": [p for p in parameters.values() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, fused=True)


def _gradients_too_large(parameters: dict[str, DTensor], device: torch.device) -> bool:
    """Whether the whole model's float32 gradients, which each rank holds between syncs, are too large."""
    if device.type == "cpu":
        return False
    num_bytes = 4 * sum(p.numel() for p in parameters.values())
    limit = UNSHARDED_SHARE * torch.cuda.get_device_properties(device).total_memory
    if num_bytes > limit:
        logger.info("gradients are reduced after every microbatch: %.1f GiB unsharded would not fit", num_bytes / 2**30)
    return num_bytes > limit


def _local(tensor: DTensor) -> Tensor:
    """This rank's piece, sharing memory with the tensor. Without autograd: its way costs 50 µs a tensor, 20 ms a step."""
    with torch.no_grad():
        return tensor.to_local()


def _shard(tensor: DTensor) -> Shard:
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Shard(local=_local(tensor), offsets=tuple(offsets), shape=tuple(tensor.shape))


def _is_writer(tensor: DTensor) -> bool:
    """Whether this rank is the first of those that hold the same piece."""
    coordinate = tensor.device_mesh.get_coordinate()
    return all(at == 0 for at, place in zip(coordinate, tensor.placements, strict=True) if not place.is_shard())


def _shard_groups(tensor: DTensor) -> list[dist.ProcessGroup]:
    """Groups over which the pieces of a tensor differ."""
    places = enumerate(tensor.placements)
    return [tensor.device_mesh.get_group(axis) for axis, place in places if place.is_shard()]
