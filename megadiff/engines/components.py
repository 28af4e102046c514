"""The engine of a model: one ShardedEngine for each trained component, of which Wan2.2's experts are two.

A row of a batch belongs to the component in charge of its sigma. Components work one after another, each on its own rows,
in the same order on every rank; of several, one without a weighted row on any rank is left alone, its optimizer included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor

from megadiff.config.schema import Config
from megadiff.engines.base import Loss
from megadiff.engines.gate import StepGate
from megadiff.engines.lora import check_lora, lora_values
from megadiff.engines.microbatch import Batch, Share, component_rows, num_microbatches, row_weights
from megadiff.engines.sharded import ShardedEngine, Step
from megadiff.models.adapter import ModelAdapter
from megadiff.parallel.collectives import all_reduce_max, all_reduce_sums
from megadiff.parallel.mesh import Mesh
from megadiff.tensors.shards import ShardFolder, write_shards
from megadiff.types import LogProbs, LoraSpec, TrainBatch


class ComponentsEngine:
    """Fulfils engines.base.Engine. members: component → its engine, in the model's order.

    Of several members one at most has what an update needs on the accelerator (engine.offload_idle): that of the others,
    AdamW's moments and under Megatron masters, is on the host.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        adapter: ModelAdapter,
        *,
        build: Callable[[str], ShardedEngine],
    ) -> None:
        """build: component → its engine, with the checkpoint's weights."""
        self.config, self.mesh, self.adapter = config, mesh, adapter
        self.members: dict[str, ShardedEngine] = {}
        self.gate = StepGate(mesh.device)
        self.changed = set(adapter.components)
        self._trained = [
            name for name in adapter.components if name in config.train.components
        ] or [*adapter.components]
        for component in adapter.components:
            self.members[component] = build(component)
            self.members[component].gate = self.gate
            self._rest()

    @property
    def lora(self) -> LoraSpec | None:
        """The same for all components."""
        return self.members[self.adapter.components[0]].lora

    def log_probs(self, batch: TrainBatch) -> LogProbs:
        self._rest()
        shape = (batch.num_samples, batch.num_window_steps)
        found = LogProbs(
            log_probs_NW=torch.empty(shape, dtype=torch.float64),
            means_NWLC=torch.empty(*shape, *batch.latents_NSLC.shape[2:]),
        )
        for component, share in self._shares(batch).items():
            if share.num_microbatches:
                self.members[component].log_probs(batch, share, found)
        return found

    def update(self, batch: Batch, loss: Loss) -> dict[str, float]:
        """Raises NonFiniteError on every rank when a component's loss or gradient is not finite; its weights, and those of the
        components after it, were left as they were."""
        shares = self._shares(batch)
        whole = (batch.denominator or 1.0) * self._trained_share(shares)
        rates = {component: self.members[component].learning_rate for component in self._trained}
        steps: dict[str, Step] = {}
        for component in self._trained:
            share, member = shares[component], self.members[component]
            if len(self.members) > 1 and not share.num_pairs:
                continue
            self._rest()
            member.onload()
            own = max(share.num_pairs, 1.0)
            denominator = own if self.config.train.component_weighting == "equal" else whole
            steps[component] = member.update(batch, loss, share, denominator=denominator)
            self.changed.add(component)
        self._rest()
        return self._sums(steps, whole) | self._figures(steps, shares, rates)

    def named_weights(
        self, bucket_bytes: int, components: Collection[str] | None = None
    ) -> Iterator[list[tuple[str, Tensor]]]:
        self._rest()
        for component in self._asked(components):
            yield from self.members[component].named_weights(bucket_bytes)

    def named_lora(
        self, bucket_bytes: int, components: Collection[str] | None = None
    ) -> Iterator[list[tuple[str, Tensor]]]:
        self._rest()
        for component in self._asked(components):
            yield from self.members[component].named_lora(bucket_bytes)

    def mark_pushed(self) -> None:
        self.changed.clear()

    @contextmanager
    def reference(self) -> Iterator[None]:
        with ExitStack() as stack:
            for member in self.members.values():
                stack.enter_context(member.reference())
            yield

    @contextmanager
    def averaged(self) -> Iterator[None]:
        averaging = {
            component for component, member in self.members.items() if member.keeps_average
        }
        with ExitStack() as stack:
            for member in self.members.values():
                stack.enter_context(member.averaged())
            self.changed |= averaging
            try:
                yield
            finally:
                self.changed |= averaging

    def save(self, folder: Path) -> None:
        """One file a rank: its pieces of the float32 weights and AdamW's moments. Replicas are written once."""
        shards = {
            key: pieces
            for member in self.members.values()
            for key, pieces in member.shards().items()
        }
        values: dict[str, object] = {
            "optimizer_steps": {
                component: member.num_updates for component, member in self.members.items()
            }
        }
        if self.lora:
            values["lora"] = lora_values(self.lora)
        write_shards(
            folder, shards, rank=self.mesh.rank, num_files=self.mesh.world_size, values=values
        )

    def save_now(self, folder: Path, timeout_s: float) -> None:
        """Save from a rescue's thread; see engines.base.Engine."""
        self.gate.end(timeout_s)
        if self.gate.is_torn:
            raise RuntimeError("an optimizer step broke off half-way: the weights are of no policy")
        with self.gate.after_changes():
            for member in self.members.values():
                member.undo_exchange()
            self.save(folder)

    def load(self, folder: Path) -> None:
        """As ShardedEngine.load says, without collectives."""
        source = ShardFolder(folder)
        check_lora(source, self.lora)
        for member in self.members.values():
            member.load(source)
        self.changed = set(self.members)

    def offload(self) -> None:
        for member in self.members.values():
            member.offload()

    def onload(self) -> None:
        """Members that rest between their updates come back with the next of those."""
        for member in self.members.values():
            member.onload()
        self._rest()

    def _rest(self) -> None:
        """Collective. Idle members give up their memory on the accelerator; those that did so before do nothing."""
        if self.config.engine.offload_idle and len(self.adapter.components) > 1:
            self.offload()

    def _asked(self, components: Collection[str] | None) -> list[str]:
        return [
            component for component in self.members if components is None or component in components
        ]

    def _shares(self, batch: Batch) -> dict[str, Share]:
        """Collective. What every component has of the batch."""
        rows, weights_R = (
            component_rows(batch, self.adapter.component_of),
            row_weights(batch).double(),
        )
        none, size = torch.empty(0, dtype=torch.int64), self.config.train.microbatch_size
        mine = {component: rows.get(component, none) for component in self.members}
        counts = {
            component: num_microbatches(len(rows_R), size) for component, rows_R in mine.items()
        }
        pairs = {component: float(weights_R[rows_R].sum()) for component, rows_R in mine.items()}
        counts, pairs = (
            all_reduce_max(counts, self.mesh.cpu_group),
            all_reduce_sums(pairs, self.mesh.cpu_group),
        )
        peers = self.mesh.sp * self.mesh.tp  # have the same rows
        return {
            component: Share(
                rows_R=rows_R,
                num_microbatches=int(counts[component]),
                num_pairs=pairs[component] / peers,
            )
            for component, rows_R in mine.items()
        }

    def _trained_share(self, shares: dict[str, Share]) -> float:
        """Of all weighted pairs, those of components that are trained: exactly 1 where all are."""
        total = sum(share.num_pairs for share in shares.values())
        trained = sum(shares[component].num_pairs for component in self._trained)
        return trained / total if trained else 1.0

    def _sums(self, steps: dict[str, Step], denominator: float) -> dict[str, float]:
        """The loss's figures over all ranks and components, a mean over all pairs."""
        totals: dict[str, float] = {}
        for step in steps.values():
            for name, value in step.sums.items():
                totals[name] = totals.get(name, 0.0) + float(value)
        sums = all_reduce_sums(totals, self.mesh.dp_group)
        return {name: value / denominator for name, value in sums.items()}

    def _figures(
        self, steps: dict[str, Step], shares: dict[str, Share], rates: dict[str, float]
    ) -> dict[str, float]:
        """Of several components each has its own figures too; an idle one's gradient is 0."""
        norms = {
            component: steps[component].grad_norm if component in steps else 0.0
            for component in self._trained
        }
        figures = {"optim/grad_norm": math.hypot(*norms.values()), "optim/lr": max(rates.values())}
        if len(self.members) == 1:
            return figures
        figures |= {
            f"train/pairs/{component}": share.num_pairs for component, share in shares.items()
        }
        figures |= {f"optim/grad_norm/{component}": norm for component, norm in norms.items()}
        return figures | {f"optim/lr/{component}": rate for component, rate in rates.items()}
