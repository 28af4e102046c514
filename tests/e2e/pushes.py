"""Pushes to real replicas without an engine: weights that lie in memory, and a WeightSync from here
over any transport.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from safetensors.torch import load_file
from two_policies import sync_without_engine

from megadiff.config.rollout import HEARTBEAT_S
from megadiff.rollout.client.client import ReplicaClient, ReplicaError
from megadiff.rollout.client.fleet import Fleet
from megadiff.sync.sync import WeightSync
from megadiff.sync.transports import shared_memory
from megadiff.tensors.manifest import folder_manifest
from megadiff.tensors.model_files import weight_files
from megadiff.types import LoraSpec, Tensors
from tests.meshes import one_rank_mesh


def folder_weights(model: Path, components: Collection[str]) -> Tensors:
    """The components' tensors on disk, under the names that a push uses."""
    return {
        f"{component}.{name}": tensor
        for component in components
        for file in weight_files(model / component)
        for name, tensor in load_file(file).items()
    }


class Source:
    """Weights times a factor, in buckets of about bucket_bytes; with `lora`, those of `adapter`
    beside them. changed: what every push after a whole one brings; all components unless a test
    says otherwise.
    """

    lora: LoraSpec | None = None
    adapter: Tensors = {}

    def __init__(self, weights: Tensors) -> None:
        self.weights, self.factor, self.on_bucket = weights, 1.0, lambda number: None
        self.changed = {name.partition(".")[0] for name in weights}

    def mark_pushed(self) -> None: ...

    def named_lora(self, bucket_bytes: int, components: Collection[str]):
        items = [item for item in self.adapter.items() if item[0].partition(".")[0] in components]
        yield from (items[first : first + 10] for first in range(0, len(items), 10))

    def named_weights(self, bucket_bytes: int, components: Collection[str]):
        bucket, number = [], 0
        for name, tensor in self.weights.items():
            if name.partition(".")[0] not in components:
                continue
            bucket.append((name, tensor * self.factor))
            if sum(one.nbytes for _, one in bucket) >= bucket_bytes:
                yield bucket
                number, bucket = number + 1, []
                self.on_bucket(number)
        yield bucket


def urls_of(registry: Path) -> dict[str, str]:
    """name → url of the replicas in a registry."""
    found = [json.loads(path.read_text()) for path in sorted(registry.glob("*.json"))]
    return {entry["name"]: entry["url"] for entry in found}


@contextmanager
def sync_between(
    source: Source,
    urls: dict[str, str],
    transport: str,
    *,
    model: Path,
    folder: Path,
    bucket_bytes: int = 1 << 20,
    heartbeat_s: float = HEARTBEAT_S,
    client: Callable[..., ReplicaClient] = ReplicaClient,
) -> Iterator[tuple[WeightSync, Fleet]]:
    """The sync of a transport to replicas, name → url, and the fleet that they are.

    folder: of transport disk. client: url, name → what talks to a replica.
    """
    components = sorted({name.partition(".")[0] for name in source.weights})
    clients = [client(url, name, timeout_s=60) for name, url in urls.items()]
    with Fleet(clients, batch_size=4, heartbeat_s=heartbeat_s) as fleet:
        sync = sync_without_engine(
            source,
            fleet,
            transport,
            manifest=folder_manifest(model, tuple(components), dtype="float32"),
            mesh=one_rank_mesh(),
            folder=folder,
            bucket_bytes=bucket_bytes,
            heartbeat_s=heartbeat_s,
        )
        yield sync, fleet
        sync.close()
        # else the next run would wait until this one counts as gone
        for one in clients:
            with suppress(ReplicaError):
                one.release()


def buckets_left() -> list[str]:
    """In shared memory, of this process and all that it started: other tests push at the same
    time.
    """
    own = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    files = (path.name for path in shared_memory.FOLDER.glob(f"{shared_memory.PREFIX}*"))
    return [name for name in files if int(name.split("-")[-2]) in own]
