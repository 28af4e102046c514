"""The common part of engines of one component: passes over its rows, clipping, buckets of weights.

An engine holds its component as float32 master weights, of which each rank has a shard, and AdamW's
moments of those (engines/state.py). How a shard lies in its tensor, and what has to happen before
and after weights are used, is the engine's own.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megadiff.config.schema import Config
from megadiff.engines.gathering import GATHERED_AT_ONCE, runs
from megadiff.engines.microbatch import (
    Batch,
    ComponentRows,
    FlowMicrobatch,
    Microbatch,
    loss_inputs,
    padded_microbatches,
)
from megadiff.engines.optimizer import learning_rate
from megadiff.engines.state import ComponentState
from megadiff.models.adapter import ModelAdapter
from megadiff.parallel.lora import Adapters
from megadiff.parallel.mesh import Mesh
from megadiff.parallel.plan import is_lora
from megadiff.sync.shared_base import SharedBase
from megadiff.types import DTYPES, LoraSpec, LossOutput, MatchInputs, StepInputs, Tensors

Buckets = Iterator[list[tuple[str, Tensor]]]  # of tensors by name
Loss = Callable[[StepInputs], LossOutput] | Callable[[MatchInputs], LossOutput]


class NonFiniteError(FloatingPointError):
    """Say on every rank that a loss or gradient is nan or infinite, and its weights unchanged."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """Tell what an update did.

    sums: this rank's, of the loss's figures. grad_norm: before clipping, over all ranks.
    """

    sums: Mapping[str, Tensor]
    grad_norm: float


class ShardedEngine(ComponentState):
    """Train one component of a model. Collective: all ranks make the same calls.

    gradient_scale: factor that makes the backend's reduction over ranks a sum over dp.
    shared_base: LoRA's frozen weights, where replicas map them; else None.
    """

    gradient_scale: float = 1.0
    shared_base: SharedBase | None = None

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        adapter: ModelAdapter,
        *,
        transformer: nn.Module,
        adapters: Adapters | None,
        **state: Any,
    ) -> None:
        """Take over a component. state: the other arguments of ComponentState.

        adapters: LoRA. Then optimized and masters are of its tensors alone, and all else is frozen.
        """
        super().__init__(config, mesh, **state)
        self.adapter = adapter
        self.transformer = transformer
        self._adapters = adapters

    @abstractmethod
    def _in_use(self) -> AbstractContextManager[None]:
        """Keep the transformer's weights equal to the masters, whole where it needs them whole."""

    @abstractmethod
    def _microbatch(self, *, last: bool) -> AbstractContextManager[None]:
        """Enclose one forward and backward; the last one reduces gradients over ranks."""

    @abstractmethod
    def _reduced_gradients(self) -> Tensors:
        """Return name → this rank's shard of the reduced gradient, where AdamW reads it."""

    @abstractmethod
    def _full_shape(self, name: str) -> Sequence[int]:
        """Return the shape of the whole tensor."""

    @abstractmethod
    def _full_weights(self, names: Sequence[str], dtype: torch.dtype) -> list[Tensor]:
        """Gather the whole tensors that forward uses, as new memory. Collective."""

    @property
    def lora(self) -> LoraSpec | None:
        """The low-rank adapters beside frozen weights; None where all weights are trained."""
        return self._adapters.spec if self._adapters else None

    def velocities(self, batch: Batch, rows: ComponentRows, into_RLC: Tensor) -> None:
        """Fill in the velocities of the component's rows, without gradient."""
        with torch.no_grad(), self._in_use():
            size = self.config.train.microbatch_size
            for microbatch, counts in padded_microbatches(batch, rows, size, self.mesh.device):
                velocity_BLC = self._velocity(microbatch)
                if counts:  # a filler has joined the collectives, which was its use
                    into_RLC[microbatch.row_B] = velocity_BLC.cpu()

    def update(self, batch: Batch, loss: Loss, rows: ComponentRows, *, denominator: float) -> Step:
        """Make one optimizer step over the component's rows.

        The gradient is that of the loss's sum over all ranks / denominator. Raises NonFiniteError
        on every rank, with the weights as they were, when loss or gradient is not finite.
        """
        try:
            with self._in_use():
                sums = self._backward(batch, loss, rows, self.gradient_scale / denominator)
                grad_norm = self._clip_gradients(self.config.optim.max_grad_norm, sums)
                # every time: a resumed optimizer does not know the warm-up
                for group in self.optimizer.param_groups:
                    group["lr"] = self.learning_rate
                self.onload()
                # no weight has changed up to here: an error leaves the policy as it was
                with self.gate.step():
                    self.optimizer.step()
                    self.num_updates += 1
                    self._update_average()
        finally:
            self._drop_gradients()

        self._masters_changed()
        return Step(sums=sums, grad_norm=grad_norm)

    def buckets(self, bucket_bytes: int, groups: Collection[str] | None, *, lora: bool) -> Buckets:
        """Give LoRA's full tensors, or else the weights, as Engine.named_weights says."""
        dtype = DTYPES[self.config.model.dtype]
        names = [name for name, _ in self.transformer.named_parameters() if is_lora(name) == lora]
        sent_names = self.adapter.plan.sent_names(self.component, names)
        num_bytes = {
            name: math.prod(self._full_shape(name)) * dtype.itemsize
            for name in names
            if groups is None or sent_names[name].partition(".")[0] in groups
        }

        with self._in_use():
            for bucket_names in runs(num_bytes, bucket_bytes):
                # a new list: the bucket before must not stay alive through it
                bucket: list[tuple[str, Tensor]] = []
                for run in runs({name: num_bytes[name] for name in bucket_names}, GATHERED_AT_ONCE):
                    tensors = self._full_weights(run, dtype)
                    bucket += zip((sent_names[name] for name in run), tensors, strict=True)
                    del tensors
                yield bucket

    @contextmanager
    def reference(self) -> Iterator[None]:
        if self._adapters:
            with self._adapters.off():
                yield
            return
        if self._reference is None:
            raise ValueError("this engine keeps no reference weights; its algorithm needs none")
        with self._swapped(self._reference):
            yield

    def _velocity(self, microbatch: Microbatch | FlowMicrobatch) -> Tensor:
        return self.adapter.velocity(
            self.transformer,
            microbatch.latents_BLC,
            microbatch.sigma_B,
            microbatch.conditioning,
            microbatch.sampling,
            component=self.component,
        )

    def _backward(self, batch: Batch, loss: Loss, rows: ComponentRows, scale: float) -> Tensors:
        """Accumulate the gradient over microbatches. Return this rank's sums of the loss's figures.

        A filler's gradient is zero, whatever its loss is, which need not be finite.
        """
        totals: Tensors = {}
        size = self.config.train.microbatch_size
        microbatches = padded_microbatches(batch, rows, size, self.mesh.device)

        for index, (microbatch, counts) in enumerate(microbatches):
            with self._microbatch(last=index == rows.num_microbatches - 1):
                velocity_BLC = self._velocity(microbatch)
                # a filler goes through backward too: its hooks hold the collectives
                loss_velocity_BLC = velocity_BLC if counts else velocity_BLC.detach()
                inputs = loss_inputs(batch, microbatch, loss_velocity_BLC)
                output = loss(inputs)  # type: ignore[arg-type]  # a loss and its batches come in pairs
                (output.loss_sum * scale if counts else velocity_BLC.sum() * 0).backward()
            for name, value in output.sums.items():
                totals[name] = totals.get(name, 0) + (value if counts else torch.zeros_like(value))
        return totals

    def _clip_gradients(self, max_norm: float, sums: Mapping[str, Tensor]) -> float:
        """Clip, and return the norm over all parameters before, equal on every rank."""
        gradients = self._reduced_gradients()

        # each shard counts on its first holder only
        counted = [gradient for name, gradient in gradients.items() if self._is_first_holder(name)]
        squared = torch.zeros((), device=self.mesh.device)
        squared += torch.nn.utils.get_total_norm(counted).float().square()
        for name, value in sums.items():
            if name.startswith("loss/"):
                squared += 0 * value.float()  # nan where one rank's loss is not finite
        # over all ranks: each shard was counted once, and a nan reaches everybody
        dist.all_reduce(squared)
        norm = squared.sqrt()

        if not torch.isfinite(norm):
            raise NonFiniteError(
                f"gradient norm is {norm.item()}; the weights were left as they were"
            )

        if gradients:
            # 1e-6 as in torch.nn.utils.clip_grad_norm_
            torch._foreach_mul_(list(gradients.values()), (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm.item()

    def _drop_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    @property
    def learning_rate(self) -> float:
        """The next update's, by optim.schedule."""
        return learning_rate(self.config, self.component, num_updates=self.num_updates)
