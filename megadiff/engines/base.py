"""The protocol that every training engine fulfils."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from torch import Tensor

from megadiff.engines.gate import StepGate
from megadiff.types import (
    FlowBatch,
    FlowInputs,
    LogProbs,
    LoraSpec,
    LossOutput,
    StepInputs,
    TrainBatch,
)

Loss = Callable[[StepInputs], LossOutput] | Callable[[FlowInputs], LossOutput]


class NonFiniteError(FloatingPointError):
    """A loss or gradient is nan or infinite; raised on every rank, before weights change."""


class Engine(Protocol):
    """Owns the policy's weights and optimizer on this rank. Every method is collective: all ranks call it, in the same order.

    lora: the low-rank adapter that is trained beside frozen weights; None where all weights are trained. changed: components
    whose trained weights an update has changed since mark_pushed(), all of them at the start; the same on every rank.
    gate: counts optimizer steps and can hold them up.
    """

    lora: LoraSpec | None
    changed: set[str]
    gate: StepGate

    def log_probs(self, batch: TrainBatch) -> LogProbs:
        """log_prob of each stored window step under the current policy, without gradient."""

    def update(self, batch: TrainBatch | FlowBatch, loss: Loss) -> dict[str, float]:
        """One optimizer step over the whole batch (microbatches × window steps accumulated).

        Returns global figures: `optim/grad_norm` (before clipping), `optim/lr`, and the loss's own sums, each divided
        by batch.denominator. The gradient is the same for every (dp, sp, tp) of the same global batch.
        """

    def named_weights(
        self, bucket_bytes: int, components: Collection[str] | None = None
    ) -> Iterator[list[tuple[str, Tensor]]]:
        """Full tensors under diffusers names with the component in front (`transformer.…`), in the rollout dtype, in
        buckets of at most bucket_bytes (one tensor may be larger), same order on every rank. All ranks iterate to the end.
        With LoRA these are the frozen weights, without it. components: of which to give; None: of all."""

    def mark_pushed(self) -> None:
        """Replicas hold all weights as they are now: `changed` is empty until the next update."""

    def named_lora(
        self, bucket_bytes: int, components: Collection[str] | None = None
    ) -> Iterator[list[tuple[str, Tensor]]]:
        """The low-rank tensors `transformer.<module>.lora_{A,B}.weight` in the same way, unscaled; none without LoRA."""

    def reference(self) -> AbstractContextManager[None]:
        """Within the context log_probs() answers for the reference policy: the weights at step 0, or with LoRA the frozen
        ones, its adapter switched off."""

    def averaged(self) -> AbstractContextManager[None]:
        """Within the context the weights are the running average (algorithm.ema_decay); without one nothing changes."""

    def save(self, folder: Path) -> None:
        """Write weights and optimizer state into folder; each rank its own files."""

    def load(self, folder: Path) -> None:
        """Read what save() wrote, under this or another layout and world size."""

    def save_now(self, folder: Path, timeout_s: float) -> None:
        """Write what save() writes, from another thread and without collectives, and change nothing
        any more. Raises TimeoutError when a change that is on does not end within timeout_s."""

    def offload(self) -> None:
        """Move optimizer state and gradients off the accelerator; a no-op on CPU."""

    def onload(self) -> None:
        """Undo offload()."""
