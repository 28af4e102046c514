"""The protocol that every training engine fulfils."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Set
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from torch import Tensor

from megadiff.config.schema import Config
from megadiff.engines.gate import StepGate
from megadiff.engines.microbatch import Batch
from megadiff.models.adapter import ModelAdapter
from megadiff.parallel.mesh import Mesh
from megadiff.sync.shared_base import SharedBase
from megadiff.tensors.snapshot import Snapshot
from megadiff.types import LoraSpec, LossOutput, MatchInputs, StepInputs

Buckets = Iterator[list[tuple[str, Tensor]]]  # of tensors by name
Loss = Callable[[StepInputs], LossOutput] | Callable[[MatchInputs], LossOutput]


class NonFiniteError(FloatingPointError):
    """Say on every rank that a loss or gradient is nan or infinite, and its weights unchanged."""


class Engine(Protocol):
    """Own the policy's weights and optimizer on this rank.

    Every method is collective: all ranks call it, in the same order.
    config, mesh, adapter: what it was built from.
    gate: counts optimizer steps and can hold them up.
    lora: what is trained beside frozen weights; None where all weights are trained.
    shared_base: LoRA's frozen weights where replicas map them, else None.
    changed: components that an update has changed since mark_pushed(), all of them at the start;
    the same on every rank.
    """

    # not the loop's to pass along: an engine cannot train by another config than it was built from
    config: Config
    mesh: Mesh
    adapter: ModelAdapter
    gate: StepGate

    @property
    def lora(self) -> LoraSpec | None: ...

    @property
    def shared_base(self) -> SharedBase | None: ...

    @property
    def changed(self) -> Set[str]: ...

    @property
    def num_updates(self) -> int:
        """Count optimizer steps since step 0 of the run: those of the component with the most."""

    def velocities(self, batch: Batch) -> Tensor:
        """Return the current policy's velocity of each row, without gradient.

        [R, L, C] float32 on the CPU.
        """

    def update(self, batch: Batch, loss: Loss) -> dict[str, float]:
        """Make one optimizer step over the whole batch.

        Returns global figures: `optim/grad_norm` (before clipping), `optim/lr`, and the loss's own
        sums, each divided by batch.denominator. The gradient is the same for every layout.
        """

    def named_weights(
        self, bucket_bytes: int, components: Collection[str] | None = None
    ) -> Buckets:
        """Give full tensors under diffusers names with the component in front (`transformer.…`).

        They are in the rollout dtype, in buckets of at most bucket_bytes (one tensor may be
        larger), in the same order on every rank. All ranks iterate to the end. With LoRA these are
        the frozen weights without it. Weights that the plan freezes have `~frozen` behind the
        component (ParallelPlan.sent_names). components: whose to give, as they stand in front of
        the names; None gives all.
        """

    def named_lora(self, bucket_bytes: int, components: Collection[str] | None = None) -> Buckets:
        """Give `transformer.<module>.lora_{A,B}.weight` likewise, unscaled; none without LoRA."""

    def mark_pushed(self) -> None:
        """Note that replicas hold all weights as they are now: empty `changed`."""

    def reference(self) -> AbstractContextManager[None]:
        """Let velocities() answer for the reference policy within the context.

        That is the weights at step 0, or with LoRA the frozen ones, its adapters switched off.
        """

    def averaged(self) -> AbstractContextManager[None]:
        """Use the running average (algorithm.ema_decay), if there is one, within the context."""

    def lagging(self) -> AbstractContextManager[None]:
        """Use the lagging policy (algorithm.lagging_decay), if there is one, within the context."""

    def follow(self, decay: float) -> None:
        """Move the lagging policy: decay · lagging + (1 − decay) · weights. 0 copies them."""

    def offload(self, *, waits: bool = True) -> None:
        """Move what only updates need to host memory, where engine.offload says so.

        The next update brings it back, beside its first forward and backward. waits: until the
        accelerator's memory is free; else that is begun beside other work.
        """

    def snapshot(self) -> Snapshot:
        """Return this rank's weights and optimizer state, where they are. Not collective."""

    def load(self, folder: Path) -> None:
        """Read what snapshots wrote, under this or another layout and world size."""

    def save_now(self, folder: Path, timeout_s: float) -> None:
        """Write the snapshot, from another thread and without collectives.

        Nothing changes any more after it. Raises TimeoutError when a change that is on does not
        end within timeout_s.
        """
