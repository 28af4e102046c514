"""What the engines of one component share: passes over its rows, clipping, learning rate, averages, buckets, state.

An engine holds its component as float32 master weights, of which each rank has a piece, and AdamW's state of those. How a
piece lies in its tensor, and what has to happen before and after weights are used, is the engine's own.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megadiff.config.schema import Config
from megadiff.diffusion import sde
from megadiff.engines.base import Loss, NonFiniteError
from megadiff.engines.gate import StepGate
from megadiff.engines.gathering import GATHERED_AT_ONCE, local, runs
from megadiff.engines.microbatch import (
    Batch,
    FlowMicrobatch,
    Microbatch,
    Share,
    loss_inputs,
    pieces,
)
from megadiff.models.adapter import ModelAdapter
from megadiff.parallel.lora import Adapters
from megadiff.parallel.mesh import Mesh
from megadiff.parallel.plan import is_lora
from megadiff.tensors.shards import AVERAGED, TRAINED, Shard, ShardFolder
from megadiff.types import DTYPES, LogProbs, LoraSpec, TrainBatch

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class Step:
    """What an update did. sums: this rank's, of the loss's figures. grad_norm: before clipping, over all ranks."""

    sums: Mapping[str, Tensor]
    grad_norm: float


class ShardedEngine(ABC):
    """Trains one component of a model, for engines.experts. Collective: all ranks make the same calls.

    gradient_scale: what the backend's reduction of gradients over ranks must be multiplied by to be their sum over dp.
    """

    gradient_scale: float = 1.0

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        adapter: ModelAdapter,
        *,
        component: str,
        transformer: nn.Module,
        optimizer: torch.optim.AdamW,
        optimized: Mapping[str, Tensor],
        masters: Mapping[str, Tensor],
        adapters: Adapters | None,
        frozen: bool,
        keep_reference: bool,
        average_decay: float,
    ) -> None:
        """Names are the component's own (diffusers).

        optimized: name → what the optimizer holds of the parameter on this rank. masters: name → this rank's piece of the
        float32 weights, also of those that are never trained. adapters: LoRA; then both are of its tensors alone, and all
        else is frozen. frozen: no update will come; then masters are the weights themselves, in engine.dtype, and stand for
        what else would be kept. keep_reference: hold the weights of step 0 on the CPU, which reference() needs where there are no
        adapters. average_decay: of the running average of the weights, which is sharded as they are; 0 keeps none.
        """
        self.config, self.mesh, self.adapter = config, mesh, adapter
        self.component = component
        self.transformer, self.optimizer = transformer, optimizer
        self._optimized, self._masters = dict(optimized), dict(masters)
        self._adapters = adapters
        self._can_offload = mesh.device.type != "cpu"
        self._is_offloaded = False
        self._on_host: dict[
            str, tuple[Tensor, Tensor]
        ] = {}  # name in a checkpoint → the emptied piece and its values
        self._are_masters_back = False  # alone of what was offloaded
        self.num_updates = 0
        self.gate = StepGate(mesh.device)
        self._exchanged: Mapping[str, Tensor] | None = None  # what changed places with the masters
        self._reference: dict[str, Tensor] | None = None
        if keep_reference and not adapters:
            held = {} if frozen else self._masters
            self._reference = {name: piece.to("cpu", copy=True) for name, piece in held.items()}
        self._average_decay = average_decay
        self._average: dict[str, Tensor] = {}
        if average_decay:
            self._average = {
                name: piece if frozen else piece.clone() for name, piece in self._masters.items()
            }

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
    def _full_shape(self, name: str) -> Sequence[int]:
        """Of the whole tensor."""

    @abstractmethod
    def _full_weights(self, names: Sequence[str], dtype: torch.dtype) -> list[Tensor]:
        """The whole tensors that forward uses of these parameters, the receiver's own. Collective."""

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

    @property
    def keeps_average(self) -> bool:
        return bool(self._average)

    def log_probs(self, batch: TrainBatch, share: Share, into: LogProbs) -> None:
        """Fills in what the component's rows have, without gradient."""
        sampling, size = batch.sampling, self.config.train.microbatch_size
        with torch.no_grad(), self._in_use():
            for piece, counts in pieces(batch, share, size, self.mesh.device):
                velocity_BLC = self._velocity(batch, piece)
                if not counts:
                    continue
                sigmas = (piece.sigma_B, piece.sigma_next_B)
                step = dict(schedule=batch.schedule, eta=sampling.eta)
                mean_BLC = sde.step_mean(
                    sampling.sde_type, piece.latents_BLC, velocity_BLC, *sigmas, **step
                )
                log_prob_B = sde.log_prob(
                    sampling.sde_type, piece.prev_sample_BLC, mean_BLC, *sigmas, **step
                )
                into.log_probs_NW[piece.sample_B, piece.step_B] = log_prob_B.cpu()
                into.means_NWLC[piece.sample_B, piece.step_B] = mean_BLC.cpu()

    def update(self, batch: Batch, loss: Loss, share: Share, *, denominator: float) -> Step:
        """One optimizer step over the component's rows, of the gradient of the loss's sum over all ranks / denominator.

        Raises NonFiniteError on every rank, with the weights as they were, when loss or gradient is not finite.
        """
        try:
            with self._in_use():
                sums = self._backward(batch, loss, share, self.gradient_scale / denominator)
                grad_norm = self._clip_gradients(self.config.optim.max_grad_norm, sums)
                self._set_learning_rate()
                with self.gate.step():
                    self.optimizer.step()
                    self.num_updates += 1
                    self._update_average()
        finally:
            self._drop_gradients()
        self._masters_changed()
        return Step(sums=sums, grad_norm=grad_norm)

    def named_weights(self, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        """As engines.base.Engine says, of this component."""
        return self._buckets([name for name in self._names() if not is_lora(name)], bucket_bytes)

    def named_lora(self, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        return self._buckets([name for name in self._names() if is_lora(name)], bucket_bytes)

    def _names(self) -> list[str]:
        """Of all parameters, in the module's order."""
        return [name for name, _ in self.transformer.named_parameters()]

    def _buckets(
        self, names: Iterable[str], bucket_bytes: int
    ) -> Iterator[list[tuple[str, Tensor]]]:
        dtype = DTYPES[self.config.model.dtype]
        num_bytes = {name: math.prod(self._full_shape(name)) * dtype.itemsize for name in names}
        with self._in_use():
            for bucket_names in runs(num_bytes, bucket_bytes):
                bucket: list[tuple[str, Tensor]] = []  # without the one before
                for run in runs({name: num_bytes[name] for name in bucket_names}, GATHERED_AT_ONCE):
                    tensors = self._full_weights(run, dtype)
                    bucket += [
                        (f"{self.component}.{name}", one)
                        for name, one in zip(run, tensors, strict=True)
                    ]
                    del tensors
                yield bucket

    @contextmanager
    def reference(self) -> Iterator[None]:
        if self._adapters:
            with self._adapters.off():
                yield
            return
        if self._reference is None:
            raise ValueError(
                "this engine keeps no reference weights; build it with keep_reference=True (kl_coef > 0)"
            )
        with self._swapped(self._reference):
            yield

    @contextmanager
    def averaged(self) -> Iterator[None]:
        with self._swapped(self._average):
            yield

    def shards(self) -> dict[str, list[Shard]]:
        """Name in a checkpoint → this rank's pieces of the float32 weights and AdamW's moments, wherever they are now. What
        several ranks hold is the first one's. Frozen weights come as they are, in engine.dtype."""
        held = (
            (key, name, piece) for key, name, piece in self._state() if self._is_first_holder(name)
        )
        return {
            key: self._places(name, self._on_host.get(key, (None, piece))[1])
            for key, name, piece in held
        }

    def load(self, source: ShardFolder) -> None:
        """Bit exact under any layout, world size and engine. Raises ValueError that names what is torn: the file and
        tensor. Without collectives: a rank that finds a torn file leaves no other waiting."""
        self._check_average(source)
        self._onload_masters()
        self.num_updates = int(source.values["optimizer_steps"].get(self.component, 0))
        self._create_moments(source)
        for key, name, piece in self._state():
            if key.startswith(f"{AVERAGED}/") and piece is self._masters[name]:
                continue  # nothing is averaged of what is not trained, whatever was when this was saved
            piece = self._on_host.get(key, (None, piece))[1]
            whole = (
                piece
                if piece.dtype == torch.float32
                else torch.empty_like(piece, dtype=torch.float32)
            )
            for shard in self._places(name, whole):
                source.read_into(key, shard)
            if whole is not piece:
                piece.copy_(whole)
        self._masters_changed()

    def offload(self) -> None:
        """Move what only an update needs off the accelerator; nothing on CPU, and where it has been done."""
        if not self._can_offload or (self._is_offloaded and not self._are_masters_back):
            return
        self._is_offloaded, self._are_masters_back = True, False
        with self.gate.change(tears=False):
            for key, piece in self._offloadable().items():
                if key not in self._on_host:
                    self._put_away(key, piece)
        torch.cuda.empty_cache()

    def onload(self) -> None:
        """Undo offload()."""
        self._bring_back([*self._on_host])
        self._is_offloaded = self._are_masters_back = False

    def _onload_masters(self) -> None:
        """What is exchanged or read anew, and not the moments, of which there are two for each: they stay until an update."""
        masters = [key for key in self._on_host if key.startswith(f"{TRAINED}/")]
        self._bring_back(masters)
        self._are_masters_back |= bool(masters)

    def _put_away(self, key: str, piece: Tensor) -> None:
        self._on_host[key] = (piece, piece.to("cpu", copy=True))
        piece.untyped_storage().resize_(0)

    def _bring_back(self, keys: Sequence[str]) -> None:
        with self.gate.change(tears=False):
            for key in keys:
                piece, host = self._on_host[key]
                piece.untyped_storage().resize_(host.untyped_storage().nbytes())
                piece.copy_(host)
                del self._on_host[key]  # not before: there may be no memory for it

    def _offloadable(self) -> dict[str, Tensor]:
        """Name in a checkpoint → piece, of those with a storage of their own that only an update needs."""
        return {self._moment_key(*place): moment for place, moment in self._moments().items()}

    def _velocity(self, batch: Batch, piece: Microbatch | FlowMicrobatch) -> Tensor:
        return self.adapter.velocity(
            self.transformer,
            piece.latents_BLC,
            piece.sigma_B,
            piece.conditioning,
            batch.sampling,
            component=self.component,
        )

    def _backward(self, batch: Batch, loss: Loss, share: Share, scale: float) -> dict[str, Tensor]:
        """Gradients of the component's rows, accumulated over microbatches; returns this rank's sums of the loss's figures.

        A filler's gradient is zero, whatever its loss is, which need not be finite.
        """
        size, totals = self.config.train.microbatch_size, {}
        for index, (piece, counts) in enumerate(pieces(batch, share, size, self.mesh.device)):
            with self._microbatch(last=index == share.num_microbatches - 1):
                velocity_BLC = self._velocity(batch, piece)
                output = loss(
                    loss_inputs(batch, piece, velocity_BLC if counts else velocity_BLC.detach())
                )
                (output.loss_sum * scale if counts else velocity_BLC.sum() * 0).backward()
            for name, value in output.sums.items():
                totals[name] = totals.get(name, 0) + (value if counts else torch.zeros_like(value))
        return totals

    def _clip_gradients(self, max_norm: float, sums: Mapping[str, Tensor]) -> float:
        """Norm over all parameters before clipping, equal on every rank: each piece counts on its first holder."""
        gradients = self._reduced_gradients()
        counted = [gradient for name, gradient in gradients.items() if self._is_first_holder(name)]
        squared = torch.zeros((), device=self.mesh.device)
        if counted:
            squared += torch.nn.utils.get_total_norm(counted).float().square()
        for name, value in sums.items():
            if name.startswith("loss/"):
                squared += 0 * value.float()  # nan where one rank's loss is not finite
        dist.all_reduce(squared)
        norm = squared.sqrt()
        if not torch.isfinite(norm):
            raise NonFiniteError(
                f"gradient norm is {norm.item()}; the weights were left as they were"
            )
        if gradients:
            torch._foreach_mul_(list(gradients.values()), (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm.item()

    def _drop_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    @property
    def learning_rate(self) -> float:
        """Of the next update: linear warm-up over the component's first optim.warmup_steps, then constant."""
        optim = self.config.optim
        lr = optim.component_lr.get(self.component, optim.lr)
        return lr * min(1.0, (self.num_updates + 1) / max(optim.warmup_steps, 1))

    def _set_learning_rate(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate

    def _update_average(self) -> None:
        """Decay rises to its value as (1 + n) / (10 + n), so that the start is soon forgotten."""
        if self._average:
            decay = min(self._average_decay, (1 + self.num_updates) / (10 + self.num_updates))
            torch._foreach_lerp_(
                list(self._average.values()), list(self._masters.values()), 1 - decay
            )

    @contextmanager
    def _swapped(self, held: Mapping[str, Tensor]) -> Iterator[None]:
        self._swap(held)
        try:
            yield
        finally:
            self._swap(held)

    def _swap(self, held: Mapping[str, Tensor]) -> None:
        """Exchange the masters with held pieces (on any device) in place, one tensor at a time."""
        self._onload_masters()
        with self.gate.change():
            self._exchange(held)
            self._exchanged = None if self._exchanged is held else held
        self._masters_changed()

    def _exchange(self, held: Mapping[str, Tensor]) -> None:
        for name, other in held.items():
            key = f"{TRAINED}/{self.component}.{name}"
            master = self._on_host.get(key, (None, self._masters[name]))[1]
            policy = master.to(other.device, copy=True)
            master.copy_(other)
            other.copy_(policy)

    def undo_exchange(self) -> None:
        """Put the policy back into the masters, where reference() or averaged() is on for good."""
        if self._exchanged is not None:
            self._exchange(self._exchanged)
            self._exchanged = None

    def _moments(self) -> dict[tuple[str, str], Tensor]:
        """(kind, name) → AdamW's moment, of the parameters that have had a gradient: an unused branch never has."""
        states = ((name, self.optimizer.state.get(held)) for name, held in self._optimized.items())
        return {
            (kind, name): local(state[kind]) for name, state in states if state for kind in MOMENTS
        }

    def _state(self) -> Iterator[tuple[str, str, Tensor]]:
        """(name in a checkpoint, parameter's name, this rank's piece) of all that a checkpoint holds."""
        for kind, held in ((TRAINED, self._masters), (AVERAGED, self._average)):
            for name, piece in held.items():
                yield f"{kind}/{self.component}.{name}", name, piece
        for (kind, name), piece in self._moments().items():
            yield self._moment_key(kind, name), name, piece

    def _moment_key(self, kind: str, name: str) -> str:
        return f"optim/{kind}/{self.component}.{name}"

    def _check_average(self, source: ShardFolder) -> None:
        has_average = any(name.startswith(f"{AVERAGED}/") for name in source.shapes)
        if has_average != bool(self._average):  # it would be lost, or made up
            raise ValueError(
                f"{source.folder} has {'' if has_average else 'no '}averaged weights, but algorithm.ema_decay="
                f"{self._average_decay}; set it as it was, or start a new run"
            )

    def _create_moments(self, source: ShardFolder) -> None:
        """Empty optimizer state for just the parameters that the checkpoint has moments of; offloaded where the rest is."""
        self.optimizer.state.clear()
        self._on_host.clear()  # moments that are no more
        for name, held in self._optimized.items():
            if self._moment_key(MOMENTS[0], name) in source.shapes:
                moments = {kind: torch.zeros_like(held.detach()) for kind in MOMENTS}
                step = torch.tensor(
                    float(self.num_updates), dtype=torch.float32, device=self.mesh.device
                )
                self.optimizer.state[held] = {"step": step, **moments}
                for kind, moment in moments.items() if self._is_offloaded else ():
                    self._put_away(self._moment_key(kind, name), local(moment))
