"""A colocated push over several nodes: a replica hears its own node's ranks alone, and more
replicas send nothing more between nodes.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megadiff.process.identity import host_name
from megadiff.sync.bucket import BucketBody
from megadiff.tensors.fingerprint import commit_answer, fingerprints
from megadiff.train.build_sync import build_sync
from tests.distributed.engines import build
from tests.distributed.ranks import run_ranks

COLLECTIVES = ("c10d", "_c10d_functional")


class CollectiveBytes(TorchDispatchMode):
    """Sums what this rank brings to the collectives of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in COLLECTIVES and "wait" not in func.name():
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            # an all-gather names its larger output as well
            self.num_bytes += min((tensor.nbytes for tensor in tensors), default=0)
        return func(*args, **kwargs or {})


class Replica:
    """Takes a push of transport http, and says what it has."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.url = "http://127.0.0.1:1"
        self.tensors: dict[str, Tensor] = {}
        self.num_bytes = 0

    def weights_places(self) -> list[dict[str, Any]]:
        return [{"host": host_name(), "device": "cpu", "boxes": {}}]

    def weights_begin(self, *args: object, **kwargs: object) -> None: ...

    def weights_bucket(self, bucket: BucketBody) -> None:
        body = bytes(bucket)
        self.num_bytes += len(body)
        self.tensors |= safetensors.torch.load(body)

    def weights_commit(self, version: int, digests: list[str]) -> list[dict[str, Any]]:
        worker = {"fingerprints": fingerprints(self.tensors), "bound_modules": []}
        return commit_answer([worker], digests)


def _push(tiny_model: Path, folder: Path, replicas_per_node: int) -> None:
    """On a rank that is a node of its own."""
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    engine = build(tiny_model, {}, backend="veomni")
    engine.config.sync.bucket_mib = 1
    node = engine.mesh.node
    replicas = [Replica(f"replica_{node}_{index}") for index in range(replicas_per_node)]
    sync = build_sync(engine, SimpleNamespace(weight_targets=lambda: replicas))
    with CollectiveBytes() as collectives:
        sync.push(1)
    sync.close()
    figures = {
        "gathered": collectives.num_bytes,
        "received": [replica.num_bytes for replica in replicas],
        "num_tensors": [len(replica.tensors) for replica in replicas],
        "names": [replica.name for replica in replicas],
    }
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(figures))


@pytest.mark.parametrize("num_nodes", [1, 2, 4])
def test_more_replicas_send_nothing_more_between_nodes(
    tiny_model: Path, tmp_path: Path, num_nodes: int
) -> None:
    gathered = []
    for replicas_per_node in (1, 3):
        folder = tmp_path / str(replicas_per_node)
        folder.mkdir()
        run_ranks(_push, num_nodes, tiny_model, folder, replicas_per_node)
        figures = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_nodes)]
        gathered.append([node["gathered"] for node in figures])

        # each node's rank brings all weights to all of its own node's replicas
        whole = figures[0]["received"][0]
        assert whole > 0 and figures[0]["num_tensors"][0] > 0
        for node in figures:
            assert node["received"] == [whole] * replicas_per_node
            assert node["num_tensors"] == [figures[0]["num_tensors"][0]] * replicas_per_node

    # what crosses nodes is the engine's all-gather: a rank's shard, however many replicas there are
    assert gathered[0] == gathered[1]
    if num_nodes > 1:
        assert all(0 < shard <= 1.2 * whole / num_nodes for shard in gathered[0]), (gathered, whole)
