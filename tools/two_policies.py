"""Pushes without an engine: two policies of a model, and the sync of any weights to replicas."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from megadiff.config.rollout import HEARTBEAT_S
from megadiff.config.schema import LoraConfig
from megadiff.engines.gathering import runs
from megadiff.models.registry import build_adapter
from megadiff.parallel.lora import lora_spec
from megadiff.parallel.mesh import Mesh
from megadiff.process.identity import device_name, host_name
from megadiff.rollout.client.fleet import Fleet
from megadiff.sync.bucket import Bucket
from megadiff.sync.sync import WeightSource, WeightSync
from megadiff.sync.transports.choose import build_transport
from megadiff.tensors.boxes import boxes_from_json
from megadiff.tensors.lora_names import lora_manifest
from megadiff.tensors.manifest import Manifest, folder_manifest
from megadiff.tensors.model_files import weight_files
from megadiff.types import DTYPES, LoraSpec

POLICIES = ("old", "new")
LORA_BUCKETS = 8  # LoRA tensors come in buckets that are so much smaller


def sync_without_engine(
    source: WeightSource,
    fleet: Fleet,
    transport: str,
    *,
    manifest: Manifest,
    mesh: Mesh,
    folder: Path,
    bucket_bytes: int,
    heartbeat_s: float = HEARTBEAT_S,
) -> WeightSync:
    """Return the sync of this one rank to all replicas. folder: of transport disk."""
    targets = fleet.weight_targets()
    workers = {target.name: target.weights_places() for target in targets}
    here = {"host": host_name(), "device": device_name(mesh.device)}
    built = build_transport(
        transport,
        targets,
        workers,
        ranks=[here],
        rank=0,
        device=mesh.device,
        folder=folder,
        heartbeat_s=heartbeat_s,
    )
    return WeightSync(
        source,
        built,
        manifest,
        boxes={name: boxes_from_json(rows) for name, rows in workers.items()},
        bucket_bytes=bucket_bytes,
        cpu_group=mesh.cpu_group,
    )


class TwoPolicies:
    """Two policies of a model, as an engine hands them out: all weights, or LoRA beside them.

    policy: "old" or "new". Without LoRA they differ in all weights, with it in its tensors alone.
    """

    def __init__(self, model: Path) -> None:
        adapter = build_adapter(model)
        self.manifest = folder_manifest(model, adapter.components, dtype="float32")
        self.spec = lora_spec(
            LoraConfig(rank=4),
            adapter.plan,
            dict.fromkeys(name.partition(".")[2] for name in self.manifest),
        )
        self.changed = {name.partition(".")[0] for name in self.manifest}
        self.lora: LoraSpec | None = None
        self.policy = POLICIES[0]
        self._base = dict(self._from(model, adapter.components))
        self._lora = {policy: self._random(seed) for seed, policy in enumerate(POLICIES)}

    def _from(self, model: Path, components: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        for component in components:
            for file in weight_files(model / component):
                for name, tensor in load_file(file).items():
                    yield f"{component}.{name}", tensor.float()

    def _random(self, seed: int) -> dict[str, Tensor]:
        assert self.spec is not None
        generator = torch.Generator().manual_seed(seed)
        return {
            name: 0.2 * torch.randn(row["shape"], generator=generator, dtype=DTYPES[row["dtype"]])
            for name, row in lora_manifest(self.spec, self.manifest).items()
        }

    def mark_pushed(self) -> None: ...

    def named_weights(self, bucket_bytes: int, components: Collection[str]) -> Iterator[Bucket]:
        is_new = self.policy == POLICIES[1] and self.lora is None
        factor = 1.0 + is_new / 64
        return _buckets({name: t * factor for name, t in self._base.items()}, bucket_bytes)

    def named_lora(self, bucket_bytes: int, components: Collection[str]) -> Iterator[Bucket]:
        tensors = {name: tensor.clone() for name, tensor in self._lora[self.policy].items()}
        return _buckets(tensors, bucket_bytes // LORA_BUCKETS)


def _buckets(tensors: Mapping[str, Tensor], bucket_bytes: int) -> Iterator[Bucket]:
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    for names in runs(sizes, bucket_bytes):
        yield [(name, tensors[name]) for name in names]
