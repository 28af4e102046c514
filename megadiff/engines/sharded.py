"""What training engines share: the passes over a batch, clipping, learning rate, averages, buckets and checkpoints.

An engine holds its policy as float32 master weights, of which each rank has a piece, and AdamW's state of those. How a
piece lies in its tensor, and what has to happen before and after weights are used, is the engine's own.
"""

from __future__ import annotations

import importlib.metadata
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megadiff.config.schema import Config, OptimConfig
from megadiff.diffusion import sde
from megadiff.engines.base import Loss
from megadiff.engines.lora import check_lora, lora_values
from megadiff.engines.microbatch import Batch, FlowMicrobatch, Microbatch, loss_inputs, microbatches, num_microbatches
from megadiff.models.adapter import ModelAdapter
from megadiff.parallel.collectives import all_reduce_sums
from megadiff.parallel.lora import Adapters
from megadiff.parallel.mesh import Mesh
from megadiff.parallel.plan import is_lora
from megadiff.types import DTYPES, LogProbs, LoraSpec, TrainBatch
from megadiff.weights.shards import AVERAGED, TRAINED, Shard, ShardFolder, write_shards

MOMENTS = ("exp_avg", "exp_avg_sq")


class ShardedEngine(ABC):
    """Fulfils engines.base.Engine for models with one trained component. Collective: all ranks make the same calls.

    gradient_scale: what the backend's reduction of gradients over ranks must be multiplied by to be their sum over dp.
    """

    gradient_scale: float = 1.0

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        adapter: ModelAdapter,
        *,
        transformer: nn.Module,
        optimizer: torch.optim.AdamW,
        optimized: Mapping[str, Tensor],
        masters: Mapping[str, Tensor],
        adapters: Adapters | None,
        keep_reference: bool,
        average_decay: float,
    ) -> None:
        """Names are the component's own (diffusers).

        optimized: name → what the optimizer holds of the parameter on this rank. masters: name → this rank's piece of the
        float32 weights, also of those that are never trained. adapters: LoRA; then both are of its tensors alone, and all
        else is frozen. keep_reference: hold the weights of step 0 on the CPU, which reference() needs where there are no
        adapters. average_decay: of the running average of the weights, which is sharded as they are; 0 keeps none.
        """
        self.config, self.mesh, self.adapter = config, mesh, adapter
        self.component = adapter.components[0]
        self.transformer, self.optimizer = transformer, optimizer
        self._optimized, self._masters = dict(optimized), dict(masters)
        self._adapters = adapters
        self._offloaded: list[tuple[Tensor, Tensor]] = []
        self._num_updates = 0
        self._reference: dict[str, Tensor] | None = None
        if keep_reference and not adapters:
            self._reference = {name: piece.to("cpu", copy=True) for name, piece in self._masters.items()}
        self._average_decay = average_decay
        self._average: dict[str, Tensor] = {}
        if average_decay:
            self._average = {name: piece.clone() for name, piece in self._masters.items()}

    @abstractmethod
    def _in_use(self) -> AbstractContextManager[None]:
        """Within the context the transformer's weights are the masters', whole where it needs them whole."""

    @abstractmethod
    def _microbatch(self, *, last: bool) -> AbstractContextManager[None]:
        """Around one forward and backward of an update; gradients are reduced over ranks in the last of them."""

    @abstractmethod
    def _reduced_gradients(self) -> dict[str, Tensor]:
        """name → this rank's piece of the gradient, reduced over all ranks, where AdamW reads it."""

    @abstractmethod
    def _full_weight(self, name: str, dtype: torch.dtype) -> Tensor:
        """The whole tensor that forward uses of a parameter, the receiver's own. Collective."""

    @abstractmethod
    def _places(self, name: str, piece: Tensor) -> list[Shard]:
        """Where a piece (a master's, an average's, a moment's) lies in the full tensor; the shards share its memory."""

    @abstractmethod
    def _is_first_holder(self, name: str) -> bool:
        """Whether this rank is the first of those that hold the same piece of the parameter."""

    @abstractmethod
    def _masters_changed(self) -> None:
        """Called after masters were written to. Without collectives, as it is also called on the way out of an error."""

    @property
    def lora(self) -> LoraSpec | None:
        """What is trained beside the frozen weights; None where all weights are trained."""
        return self._adapters.spec if self._adapters else None

    def log_probs(self, batch: TrainBatch) -> LogProbs:
        sampling, size = batch.sampling, self.config.train.microbatch_size
        log_probs_NW = torch.empty(batch.old_log_probs_NW.shape, dtype=torch.float64)
        means_NWLC = torch.empty(*log_probs_NW.shape, *batch.latents_NSLC.shape[2:])
        with torch.no_grad(), self._in_use():
            for piece in microbatches(batch, size, self.mesh.device):
                sigmas = (piece.sigma_B, piece.sigma_next_B)
                step = dict(schedule=batch.schedule, eta=sampling.eta)
                velocity_BLC = self._velocity(batch, piece)
                mean_BLC = sde.step_mean(sampling.sde_type, piece.latents_BLC, velocity_BLC, *sigmas, **step)
                log_prob_B = sde.log_prob(sampling.sde_type, piece.prev_sample_BLC, mean_BLC, *sigmas, **step)
                log_probs_NW[piece.sample_B, piece.step_B] = log_prob_B.cpu()
                means_NWLC[piece.sample_B, piece.step_B] = mean_BLC.cpu()
        return LogProbs(log_probs_NW=log_probs_NW, means_NWLC=means_NWLC)

    def update(self, batch: Batch, loss: Loss) -> dict[str, float]:
        """Raises FloatingPointError on every rank, with the weights as they were, when the gradient is not finite."""
        denominator = batch.denominator or 1.0  # 0: every weight is 0, and so is every sum
        try:
            with self._in_use():
                totals = self._backward(batch, loss, self.gradient_scale / denominator)
                grad_norm = self._clip_gradients(self.config.optim.max_grad_norm)
                lr = self._set_learning_rate()
                self.optimizer.step()
        finally:
            self._drop_gradients()
        self._num_updates += 1
        self._update_average()
        self._masters_changed()
        sums = all_reduce_sums({name: float(value) for name, value in totals.items()}, self.mesh.dp_group)
        figures = {name: value / denominator for name, value in sums.items()}
        return figures | {"optim/grad_norm": grad_norm, "optim/lr": lr}

    def named_weights(self, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        return self._buckets([name for name in self._names() if not is_lora(name)], bucket_bytes)

    def named_lora(self, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        return self._buckets([name for name in self._names() if is_lora(name)], bucket_bytes)

    def _names(self) -> list[str]:
        """Of all parameters, in the module's order."""
        return [name for name, _ in self.transformer.named_parameters()]

    def _buckets(self, names: Iterable[str], bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        dtype = DTYPES[self.config.model.dtype]
        bucket: list[tuple[str, Tensor]] = []
        num_bytes = 0
        with self._in_use():
            for name in names:
                tensor = self._full_weight(name, dtype)
                if bucket and num_bytes + tensor.nbytes > bucket_bytes:
                    yield bucket
                    bucket, num_bytes = [], 0
                bucket.append((f"{self.component}.{name}", tensor))
                num_bytes += tensor.nbytes
            if bucket:
                yield bucket

    @contextmanager
    def reference(self) -> Iterator[None]:
        if self._adapters:
            with self._adapters.off():
                yield
            return
        if self._reference is None:
            raise ValueError("this engine keeps no reference weights; build it with keep_reference=True (kl_coef > 0)")
        with self._swapped(self._reference):
            yield

    @contextmanager
    def averaged(self) -> Iterator[None]:
        with self._swapped(self._average):
            yield

    def save(self, folder: Path) -> None:
        """One file a rank: its pieces of the float32 weights and AdamW's moments. Replicas are written once."""
        assert not self._offloaded, "save() while offloaded"
        state = ((key, name, piece) for key, name, piece in self._state() if self._is_first_holder(name))
        shards = {key: self._places(name, piece) for key, name, piece in state}
        values: dict[str, object] = {"optimizer_steps": self._num_updates}
        if self.lora:
            values["lora"] = lora_values(self.lora)
        write_shards(folder, shards, rank=self.mesh.rank, num_files=self.mesh.world_size, values=values)

    def load(self, folder: Path) -> None:
        """Bit exact under any layout, world size and engine. Raises ValueError that names what is torn: the file and
        tensor. Without collectives: a rank that finds a torn file leaves no other waiting."""
        source = ShardFolder(folder)
        check_lora(source, self.lora)
        self._check_average(source)
        self._create_moments(source)
        for key, name, piece in self._state():
            for shard in self._places(name, piece):
                source.read_into(key, shard)
        self._num_updates = int(source.values["optimizer_steps"])
        self._masters_changed()

    def offload(self) -> None:
        if self.mesh.device.type == "cpu" or self._offloaded:
            return
        for piece in self._offloadable():
            self._offloaded.append((piece, piece.to("cpu", copy=True)))
            piece.untyped_storage().resize_(0)
        torch.cuda.empty_cache()

    def onload(self) -> None:
        for piece, host in self._offloaded:
            piece.untyped_storage().resize_(host.untyped_storage().nbytes())
            piece.copy_(host)
        self._offloaded.clear()

    def _offloadable(self) -> list[Tensor]:
        """Pieces with a storage of their own that only an update needs."""
        return list(self._moments().values())

    def _velocity(self, batch: Batch, piece: Microbatch | FlowMicrobatch) -> Tensor:
        return self.adapter.velocity(
            self.transformer, piece.latents_BLC, piece.sigma_B, piece.conditioning, batch.sampling
        )

    def _backward(self, batch: Batch, loss: Loss, scale: float) -> dict[str, Tensor]:
        """Gradients of the whole batch, accumulated over microbatches; returns this rank's sums of the loss's figures."""
        size, totals = self.config.train.microbatch_size, {}
        for index, piece in enumerate(microbatches(batch, size, self.mesh.device)):
            with self._microbatch(last=index == num_microbatches(batch, size) - 1):
                output = loss(loss_inputs(batch, piece, self._velocity(batch, piece)))
                (output.loss_sum * scale).backward()
            for name, value in output.sums.items():
                totals[name] = totals.get(name, 0) + value
        return totals

    def _clip_gradients(self, max_norm: float) -> float:
        """Norm over all parameters before clipping, equal on every rank: each piece counts on its first holder."""
        gradients = self._reduced_gradients()
        counted = [gradient for name, gradient in gradients.items() if self._is_first_holder(name)]
        squared = torch.zeros((), device=self.mesh.device)
        if counted:
            squared += torch.nn.utils.get_total_norm(counted).float().square()
        dist.all_reduce(squared)
        norm = squared.sqrt()
        if not torch.isfinite(norm):
            raise FloatingPointError(f"gradient norm is {norm.item()}; the weights were left as they were")
        if gradients:
            torch._foreach_mul_(list(gradients.values()), (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm.item()

    def _drop_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

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
            torch._foreach_lerp_(list(self._average.values()), list(self._masters.values()), 1 - decay)

    @contextmanager
    def _swapped(self, held: Mapping[str, Tensor]) -> Iterator[None]:
        self._swap(held)
        try:
            yield
        finally:
            self._swap(held)

    def _swap(self, held: Mapping[str, Tensor]) -> None:
        """Exchange the masters with held pieces (on any device) in place, one tensor at a time."""
        assert not self._offloaded, "weights are exchanged while offloaded"
        for name, other in held.items():
            master = self._masters[name]
            policy = master.to(other.device, copy=True)
            master.copy_(other)
            other.copy_(policy)
        self._masters_changed()

    def _moments(self) -> dict[tuple[str, str], Tensor]:
        """(kind, name) → AdamW's moment, of the parameters that have had a gradient: an unused branch never has."""
        states = ((name, self.optimizer.state.get(held)) for name, held in self._optimized.items())
        return {(kind, name): local(state[kind]) for name, state in states if state for kind in MOMENTS}

    def _state(self) -> Iterator[tuple[str, str, Tensor]]:
        """(name in a checkpoint, parameter's name, this rank's piece) of all that a checkpoint holds."""
        for kind, pieces in ((TRAINED, self._masters), (AVERAGED, self._average)):
            for name, piece in pieces.items():
                yield f"{kind}/{self.component}.{name}", name, piece
        for (kind, name), piece in self._moments().items():
            yield f"optim/{kind}/{self.component}.{name}", name, piece

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
        for name, held in self._optimized.items():
            if f"optim/{MOMENTS[0]}/{self.component}.{name}" in source.shapes:
                moments = {kind: torch.zeros_like(held.detach()) for kind in MOMENTS}
                step = torch.tensor(steps, dtype=torch.float32, device=self.mesh.device)
                self.optimizer.state[held] = {"step": step, **moments}


def local(tensor: Tensor) -> Tensor:
    """This rank's piece, sharing memory with the tensor. Without autograd: its way costs 50 µs a tensor, 20 ms a step."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def build_adamw(optim: OptimConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    """AdamW without weight decay on biases, norms and other 1-D parameters.

    It is torch's on every device and for every engine: checkpoints hold its state.
    """
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": optim.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, fused=True)


def check_version(package: str, *, tested: tuple[str, ...]) -> None:
    """Raises ValueError when another version than the tested ones is installed, or none."""
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        version = "(not installed)"
    if version not in tested:
        raise ValueError(f"{package} {version} is none of {', '.join(tested)}, on which this engine was tested")


def check_one_component(adapter: ModelAdapter) -> None:
    if len(adapter.components) != 1:
        raise ValueError(f"this engine trains one component, the model has {adapter.components}")
