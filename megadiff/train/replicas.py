"""The run's replicas: started on each node of the trainer (colocated), or found in a registry.

A colocated replica serves the ranks of its own node alone, so no request and no weight crosses
nodes but in the engine's collectives.
"""

from __future__ import annotations

import logging
import os
import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from megadiff.config.schema import Config
from megadiff.config.validate import sleeps
from megadiff.engines.shared_base import base_obstacle, shares_base
from megadiff.models.adapter import ModelAdapter
from megadiff.parallel.collectives import agreed, read_once
from megadiff.parallel.mesh import Mesh
from megadiff.process.stacks import FOLDER as STACKS
from megadiff.process.versions import sampling_code
from megadiff.rollout.client.processes import (
    ReplicaProcess,
    environment_token,
    stop_all,
    write_token,
)
from megadiff.rollout.spec import ReplicaSpec, config_spec
from megadiff.sync.transports.disk import remove
from megadiff.train.run_lock import lock

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ReplicaUsers:
    """Say which ranks share replicas: a node's where they are colocated, else all.

    source: the global rank that starts or finds them, watches them, and lets them rest.
    group: gloo, over these ranks. here: whether this rank is the source.
    dp_rank, dp: this rank's number among the dp ranks that share them, and how many there are.
    node: a number in the names of colocated replicas' files, None for separate ones.
    """

    source: int
    group: dist.ProcessGroup
    here: bool
    dp_rank: int
    dp: int
    node: int | None


def users_of(config: Config, mesh: Mesh) -> ReplicaUsers:
    """Return the ranks that this rank shares its replicas with."""
    if config.rollout.mode == "separate":
        return ReplicaUsers(
            source=0,
            group=mesh.cpu_group,
            here=mesh.rank == 0,
            dp_rank=mesh.dp_rank,
            dp=mesh.dp,
            node=None,
        )
    dp = max(1, mesh.local_world_size // (mesh.sp * mesh.tp))

    return ReplicaUsers(
        source=mesh.node_source,
        group=mesh.cpu_node_group,
        here=mesh.rank == mesh.node_source,
        dp_rank=mesh.dp_rank % dp,
        dp=dp,
        node=mesh.node,
    )


def check_num_replicas(config: Config, *, num_nodes: int) -> None:
    """Raise ValueError where the nodes of a colocated run would have unequal numbers of replicas.

    Their ranks take equally many groups, so a node with fewer replicas would hold all others up.
    """
    count = config.rollout.num_replicas
    if config.rollout.mode == "colocated" and count % num_nodes:
        raise ValueError(
            f"rollout.num_replicas={count} over {num_nodes} nodes: every node of a colocated run "
            f"has equally many; set a multiple of {num_nodes}, or 0 for one per rollout.tp GPUs"
        )


def num_replicas(config: Config, mesh: Mesh) -> int:
    """Return how many replicas this rank shares: its node's, of separate ones all."""
    num_nodes = mesh.num_nodes if config.rollout.mode == "colocated" else 1
    return replicas_per_node(
        config,
        num_nodes=num_nodes,
        num_ranks=mesh.world_size // num_nodes,
        on_gpus=mesh.device.type == "cuda",
    )


def replicas_per_node(config: Config, *, num_nodes: int, num_ranks: int, on_gpus: bool) -> int:
    """Return each node's part of rollout.num_replicas; 0 is one per tp of its ranks' GPUs.

    On a CPU it is one.
    """
    by_default = max(1, num_ranks // config.rollout.tp) if on_gpus else 1
    return config.rollout.num_replicas // num_nodes or by_default


def launch(
    config: Config, mesh: Mesh, adapter: ModelAdapter, folder: Path, stack: ExitStack
) -> list[ReplicaProcess]:
    """Start a colocated run's processes on each node's first rank; return at once. Collective.

    Returns [] on the other ranks. They end when `stack` closes, until when the folder of
    sync.transport=disk is the run's.
    """
    sampling_code()  # now: replicas that start later are compared with what the ranks imported
    if config.sync.transport == "disk":
        agreed(
            lambda: _take_weights_folder(config, mesh, folder, stack),
            mesh.cpu_group,
            here=users_of(config, mesh).here,
        )
    if config.rollout.mode != "colocated":
        return []

    token = read_once(
        lambda: fresh_token(folder), source=0, group=mesh.cpu_group, world=mesh.cpu_group
    )
    here = mesh.rank == mesh.node_source
    shared = shares_base(config, adapter, device_type=mesh.device.type, world_size=mesh.world_size)
    if config.lora.rank and not shared and mesh.rank == 0:
        obstacle = base_obstacle(
            config, adapter, device_type=mesh.device.type, world_size=mesh.world_size
        )
        logger.info("trainer and replicas hold LoRA's base apart: %s", obstacle)
    processes = agreed(
        lambda: _launch(config, mesh, folder, token, shared_base=shared), mesh.cpu_group, here=here
    )
    stack.callback(stop_all, processes or [])
    return processes or []


def fresh_token(folder: Path) -> str:
    """Return the token of all replicas that the run starts; removes an earlier attempt's.

    It is MEGADIFF_TOKEN, or drawn and written where the run's user alone can read it.
    """
    registry = registry_folder(folder)
    shutil.rmtree(registry, ignore_errors=True)
    # Without one anybody on a host could put its replicas to sleep, or push to them.
    return environment_token() or write_token(registry)


def weights_folder(config: Config, mesh: Mesh, folder: Path) -> Path:
    """Return where sync.transport=disk writes: sync.folder, or weights/ in the run's folder.

    Each node of a colocated run writes a folder of its own there.
    """
    weights = Path(config.sync.folder) if config.sync.folder else folder / "weights"
    node = users_of(config, mesh).node
    return weights / f"node_{node}" if node is not None and mesh.num_nodes > 1 else weights


def _take_weights_folder(config: Config, mesh: Mesh, folder: Path, stack: ExitStack) -> None:
    """Remove what an earlier run wrote; raise ValueError where another run is writing."""
    weights = weights_folder(config, mesh, folder)
    # Two runs in one folder would delete each other's versions, and mix them for late joiners.
    advice = f"end it or wait for it, or give {folder} another sync.folder"
    lock(weights, stack, advice=advice, run=str(folder))
    # Else replicas would load an older state before they get this one.
    remove(weights)


def registry_folder(folder: Path, node: int | None = None) -> Path:
    """Return where a colocated run's replicas are announced: all nodes' folder, or a node's."""
    replicas = folder / "replicas"
    return replicas if node is None else replicas / f"node_{node}"


def log_file(folder: Path, name: str) -> Path:
    return folder / "logs" / f"{name}.log"


def _launch(
    config: Config, mesh: Mesh, folder: Path, token: str, *, shared_base: bool
) -> list[ReplicaProcess]:
    count = num_replicas(config, mesh)
    gpus = _gpus(config, mesh, count)
    num_threads = threads_each(mesh, count * config.rollout.tp)

    processes = []
    for index in range(count):
        name = f"replica_{mesh.node * count + index}"
        processes.append(
            ReplicaProcess(
                replica_spec(config, mesh, folder, name=name, shared_base=shared_base),
                log=log_file(folder, name),
                num_threads=num_threads,
                gpus=gpus[index],
                token=token,
            )
        )

    return processes


def replica_spec(
    config: Config, mesh: Mesh, folder: Path, *, name: str, shared_base: bool = False
) -> ReplicaSpec:
    """Return how a replica of a colocated run is started."""
    device_type = mesh.device.type
    return config_spec(
        config,
        name=name,
        # any free one; its announcement tells which
        port=0,
        device="cuda" if device_type == "cuda" else "cpu",
        registry=registry_folder(folder, mesh.node),
        weights=weights_folder(config, mesh, folder) if config.sync.transport == "disk" else None,
        stacks=folder / STACKS,
        parent_pid=os.getpid(),
        # a mapped base is the trainer's, and stays
        fp8_in_place=config.rollout.fp8
        and sleeps(config, device_type=device_type)
        and not shared_base,
        shared_base=shared_base,
    )


def _gpus(config: Config, mesh: Mesh, count: int) -> list[list[int]]:
    """Return each replica's GPUs, taken in turn; none on CPU. Raises ValueError for too few."""
    num_gpus = torch.cuda.device_count() if mesh.device.type == "cuda" else 0
    if not num_gpus:
        return [[] for _ in range(count)]

    tp = config.rollout.tp
    if tp > num_gpus:
        raise ValueError(
            f"rollout.tp={tp} on {num_gpus} GPUs: each worker needs one; set rollout.tp<={num_gpus}"
        )

    if count * tp > num_gpus:
        logger.warning(
            "rollout.num_replicas*tp = %d*%d on %d GPUs: some GPUs hold several",
            count,
            tp,
            num_gpus,
        )

    gpus = []
    for first in range(0, count * tp, tp):
        gpus.append([worker % num_gpus for worker in range(first, first + tp)])
    return gpus


def threads_each(mesh: Mesh, count: int) -> int:
    """Return the threads of each of `count` processes: those of this node's ranks, divided.

    Trainer and servers take turns. Threads beyond that spin while they wait for one another.
    """
    return max(1, torch.get_num_threads() * mesh.local_world_size // count)
