"""Train all components of a model: a ShardedEngine each, behind what the training loop calls.

A row of a batch belongs to the component in charge of its sigma. Components work one after another,
each on its own rows, in the same order on every rank. A component without training samples on any
rank is skipped: no forward, no optimizer step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megadiff.config.schema import Config
from megadiff.engines.gate import StepGate
from megadiff.engines.lora import check_lora, lora_values
from megadiff.engines.microbatch import Batch, ComponentRows, component_rows, cut_rows
from megadiff.engines.offload import check_free, offloads
from megadiff.engines.sharded import Buckets, Loss, NonFiniteError, ShardedEngine, Step
from megadiff.models.adapter import ModelAdapter
from megadiff.parallel.collectives import agreed, all_reduce_max, all_reduce_sums
from megadiff.parallel.mesh import Mesh
from megadiff.sync.shared_base import SharedBase
from megadiff.tensors.shards import Shard, ShardFolder
from megadiff.tensors.snapshot import Snapshot
from megadiff.types import Figures, FlowBatch, LoraSpec


class Engine:
    """Own the policy's weights and optimizer on this rank.

    Every method is collective, but for those that say so: all ranks call it, in the same order.
    Properties are not.
    config, mesh, adapter: what it was built from.
    members: component → its engine, in the model's order.
    gate: counts optimizer steps and can hold them up.
    changed: components that an update has changed since mark_pushed(), all of them at the start;
    the same on every rank.

    With engine.offload, what only an update needs waits on the host: AdamW's moments, the running
    average, under Megatron the masters too. Of several members one at most has it on the
    accelerator.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        adapter: ModelAdapter,
        *,
        build: Callable[[str], ShardedEngine],
    ) -> None:
        """Build all members. build: component → its engine, with the checkpoint's weights."""
        # kept here, so that no caller can train by another config than the engine was built from
        self.config = config
        self.mesh = mesh
        self.adapter = adapter
        self.members: dict[str, ShardedEngine] = {}
        self.gate = StepGate(mesh.device)
        self.changed = set(adapter.components)

        chosen = [name for name in adapter.components if name in config.train.components]
        self._trained = chosen or [*adapter.components]

        self._offloads = offloads(
            config, num_components=len(adapter.components), device_type=mesh.device.type
        )
        for component in adapter.components:
            member = build(component)
            member.gate = self.gate
            self.members[component] = member
            if self._offloads:
                # first on all ranks: what one of them takes is no longer free for the next
                agreed(partial(check_free, member.num_offloaded_bytes), mesh.cpu_group)
                agreed(member.reserve_host_memory, mesh.cpu_group)
            # before the next is built: the optimizer states of two need not fit
            self.offload()

    @property
    def lora(self) -> LoraSpec | None:
        """Return what is trained beside frozen weights, alike for all components, or None."""
        return self.members[self.adapter.components[0]].lora

    @property
    def shared_base(self) -> SharedBase | None:
        """LoRA's frozen weights where replicas map them, else None.

        Only a model of one component has any.
        """
        return self.members[self.adapter.components[0]].shared_base

    def velocities(self, batch: Batch) -> Tensor:
        """Return the current policy's velocity of each row, without gradient.

        [R, L, C] float32 on the CPU.
        """
        self._offload_idle()
        latents = batch.latents_NLC if isinstance(batch, FlowBatch) else batch.latents_NSLC
        velocities_RLC = torch.empty(batch.num_rows, *latents.shape[-2:])
        for component, rows in self._component_rows(batch).items():
            if rows.num_microbatches:
                self.members[component].velocities(batch, rows, velocities_RLC)
        return velocities_RLC

    def update(self, batch: Batch, loss: Loss) -> Figures:
        """Make one optimizer step of each trained component in turn, over the whole batch.

        Returns global figures: `optim/grad_norm` (before clipping), `optim/lr`, and the loss's own
        sums, each divided by batch.denominator. The gradient is the same for every layout.
        Raises NonFiniteError on every rank when a component's loss or gradient is not finite. Its
        weights were left as they were. With optim.skip_nonfinite the others have made their steps.
        """
        rows = self._component_rows(batch)
        # 1 instead of 0: without a weighted row all sums are 0, whatever divides them
        shared_denominator = (batch.denominator or 1.0) * self._trained_fraction(rows)
        # before the steps, which move the warm-up on
        rates = {component: self.members[component].learning_rate for component in self._trained}

        steps: dict[str, Step] = {}
        failed: dict[str, NonFiniteError] = {}
        for component in self._trained:
            member = self.members[component]
            num_pairs = rows[component].num_pairs
            # AdamW's moments would move it, and decay would, without any gradient. In a model of
            # several that is usual, as a window's steps may all be another's. One alone lacks a
            # signal only where all groups do; its zero gradient is one of AdamW's, and counts.
            if len(self.members) > 1 and not num_pairs:
                continue

            self._offload_idle(but=component)
            # beside forward and backward: only the optimizer step needs it
            member.onload(waits=False)
            # "equal": each component's own mean, instead of its part of the mean over all pairs
            if self.config.train.component_weighting == "equal":
                denominator = max(num_pairs, 1.0)
            else:
                denominator = shared_denominator
            try:
                steps[component] = member.update(
                    batch, loss, rows[component], denominator=denominator
                )
            except NonFiniteError as error:
                failed[component] = error
                # the run ends and repeats the step: the fewer updates it holds, the better
                if not self.config.optim.skip_nonfinite:
                    break
            else:
                self.changed.add(component)

        self._offload_idle(waits=False)
        if failed:
            # after all of them: what is stepped over must not depend on the components' order
            raise self._joined(failed)
        return self._sums(steps, shared_denominator) | self._figures(steps, rows, rates)

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
        return self._buckets(bucket_bytes, components, lora=False)

    def named_lora(self, bucket_bytes: int, components: Collection[str] | None = None) -> Buckets:
        """Give `transformer.<module>.lora_{A,B}.weight` likewise, unscaled; none without LoRA."""
        return self._buckets(bucket_bytes, components, lora=True)

    def _buckets(
        self, bucket_bytes: int, components: Collection[str] | None, *, lora: bool
    ) -> Buckets:
        self._offload_idle()
        for member in self.members.values():
            yield from member.buckets(bucket_bytes, components, lora=lora)

    def mark_pushed(self) -> None:
        """Note that replicas hold all weights as they are now: empty `changed`. Not collective."""
        self.changed.clear()

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Let velocities() answer for the reference policy within the context.

        That is the weights at step 0, or with LoRA the frozen ones, its adapters switched off.
        """
        with ExitStack() as stack:
            for member in self.members.values():
                stack.enter_context(member.reference())
            yield

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Use the running average (algorithm.ema_decay), if there is one, within the context."""
        with self._replaced(ShardedEngine.averaged, self.config.algorithm.ema_decay > 0):
            yield

    @contextmanager
    def lagging(self) -> Iterator[None]:
        """Use the lagging policy (algorithm.lagging_decay), if there is one, within the context."""
        with self._replaced(ShardedEngine.lagging, self.config.algorithm.lagging_decay > 0):
            yield

    @contextmanager
    def _replaced(
        self, by: Callable[[ShardedEngine], AbstractContextManager[None]], differs: bool
    ) -> Iterator[None]:
        """Enter the context of all members. differs: whether it changes weights."""
        replaced: set[str] = set()
        if differs:
            # before its first update a component is its own average
            replaced = {name for name, member in self.members.items() if member.num_updates}
        with ExitStack() as stack:
            for member in self.members.values():
                stack.enter_context(by(member))
            # replicas hold the other weights: both ways have to be sent
            self.changed |= replaced
            try:
                yield
            finally:
                self.changed |= replaced

    @property
    def num_updates(self) -> int:
        """Count optimizer steps since step 0 of the run: those of the component with the most."""
        return max(member.num_updates for member in self.members.values())

    def follow(self, decay: float) -> None:
        """Move the lagging policy: decay · lagging + (1 − decay) · weights. 0 copies them."""
        for member in self.members.values():
            member.follow(decay)

    def snapshot(self) -> Snapshot:
        """Return this rank's shards of the float32 weights and AdamW's moments, where they are.

        What several ranks hold is the first one's. Not collective.
        """
        shards: dict[str, list[Shard]] = {}
        for member in self.members.values():
            shards |= member.shards()
        num_updates = {name: member.num_updates for name, member in self.members.items()}
        values: dict[str, object] = {"optimizer_steps": num_updates}
        if self.lora:
            values["lora"] = lora_values(self.lora)
        return Snapshot(
            shards=shards, rank=self.mesh.rank, num_files=self.mesh.world_size, values=values
        )

    def save(self, folder: Path) -> None:
        """Write the snapshot, one file a rank. Not collective."""
        self.snapshot().write(folder)

    def save_now(self, folder: Path, timeout_s: float) -> None:
        """Write the snapshot, from another thread and without collectives.

        Nothing changes any more after it, and collectives may be aborted. Raises TimeoutError when
        a change that is on does not end within timeout_s.
        """
        self.gate.end(timeout_s)
        if self.gate.is_torn:
            raise RuntimeError("an optimizer step broke off half-way: the weights are of no policy")
        with self.gate.after_changes():
            # the checkpoint is of the policy, also where reference() or averaged() was cut short
            for member in self.members.values():
                member.undo_exchange()
            self.save(folder)

    def load(self, folder: Path) -> None:
        """Read what snapshots wrote under any layout and world size. Not collective."""
        source = ShardFolder(folder)
        check_lora(source, self.lora)
        for member in self.members.values():
            member.load(source)
        self.changed = set(self.members)

    def close(self) -> None:
        """Give back what outlives the process: a shared base's file on a CPU. Not collective."""
        if self.shared_base:
            self.shared_base.close()

    def offload(self, *, waits: bool = True) -> None:
        """Move what only updates need to host memory, where engine.offload says so.

        The next update brings it back, beside its first forward and backward. waits: until the
        accelerator's memory is free; else that is begun beside other work.
        """
        if self._offloads:
            for member in self.members.values():
                member.offload(waits=waits)

    def _offload_idle(self, *, but: str = "", waits: bool = True) -> None:
        """Free what idle members of several have on the accelerator for updates. Collective."""
        if self._offloads and len(self.members) > 1:
            for component, member in self.members.items():
                if component != but:
                    member.offload(waits=waits)

    def _component_rows(self, batch: Batch) -> dict[str, ComponentRows]:
        """Return every component's rows of the batch. Collective."""
        # a sample's rows, one for each step of its window, follow each other
        weights_R = batch.weights_N.repeat_interleave(
            batch.num_rows // len(batch.weights_N)
        ).double()

        size = self.config.train.microbatch_size
        rows = dict.fromkeys(self.members, torch.empty(0, dtype=torch.int64))
        rows |= component_rows(batch, self.adapter.component_of)
        counts: Figures = {
            name: len(cut_rows(batch, rows_R, size)) for name, rows_R in rows.items()
        }
        pairs = {name: float(weights_R[rows_R].sum()) for name, rows_R in rows.items()}

        # of unequal numbers all ranks make the most: they must join the same collectives
        counts = all_reduce_max(counts, self.mesh.cpu_group)
        pairs = all_reduce_sums(pairs, self.mesh.cpu_group)

        num_peers = self.mesh.sp * self.mesh.tp  # which have the same rows
        return {
            name: ComponentRows(
                rows_R=rows_R,
                num_microbatches=int(counts[name]),
                num_pairs=pairs[name] / num_peers,
            )
            for name, rows_R in rows.items()
        }

    def _trained_fraction(self, rows: dict[str, ComponentRows]) -> float:
        """Return the trained components' fraction of all weighted pairs: exactly 1 for all."""
        total = sum(component.num_pairs for component in rows.values())
        trained = sum(rows[name].num_pairs for name in self._trained)
        return trained / total if trained else 1.0

    def _joined(self, failed: dict[str, NonFiniteError]) -> NonFiniteError:
        """Return one error for the components that made no step; of several it names them."""
        if len(self.members) == 1:
            return next(iter(failed.values()))
        texts = [f"{component}: {error}" for component, error in failed.items()]
        return NonFiniteError("; ".join(texts))

    def _sums(self, steps: dict[str, Step], denominator: float) -> Figures:
        """Return the loss's figures over all ranks and components, means over all pairs."""
        totals: Figures = {}
        for step in steps.values():
            for name, value in step.sums.items():
                totals[name] = totals.get(name, 0.0) + float(value)
        sums = all_reduce_sums(totals, self.mesh.dp_group)
        return {name: value / denominator for name, value in sums.items()}

    def _figures(
        self, steps: dict[str, Step], rows: dict[str, ComponentRows], rates: Figures
    ) -> Figures:
        """Return gradient norm and learning rate; of several components each one's as well."""
        # an idle component's gradient is 0
        norms = {name: steps[name].grad_norm if name in steps else 0.0 for name in self._trained}
        figures = {"optim/grad_norm": math.hypot(*norms.values()), "optim/lr": max(rates.values())}
        if len(self.members) > 1:
            figures |= {f"train/pairs/{name}": rows[name].num_pairs for name in rows}
            figures |= {f"optim/grad_norm/{name}": norm for name, norm in norms.items()}
            figures |= {f"optim/lr/{name}": rate for name, rate in rates.items()}
        return figures
