"""The run's replicas: started on each node of the trainer (colocated), or found in a registry.

A colocated replica serves the ranks of its own node alone, so no request and no weight crosses
nodes but in the engine's collectives.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
import torch.distributed as dist

from megadiff.config.schema import Config
from megadiff.config.validate import sleeps
from megadiff.observe.text_files import write_whole
from megadiff.observe.timers import Timers
from megadiff.parallel.collectives import agreed, read_once
from megadiff.parallel.mesh import Mesh
from megadiff.rollout.client.client import ReplicaClient
from megadiff.rollout.client.fleet import Fleet
from megadiff.rollout.client.processes import ReplicaProcess, environment_token, write_token
from megadiff.rollout.client.registry import wait_until_announced
from megadiff.rollout.spec import ReplicaSpec, config_spec, flag_of
from megadiff.sync.sync import WeightSync
from megadiff.sync.transports.disk import clear
from megadiff.train.judges import Judges

logger = logging.getLogger(__name__)
RUN_NAME_CHARS = 100  # of an id, which has RUN_CHARS of rollout.limits at most
RUN_ID_FILE = "run_id"  # in the run's folder


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


class RunReplicas:
    """Decide who has the GPUs: replicas and judges, or the trainer. All methods are collective."""

    def __init__(
        self,
        fleet: Fleet,
        sync: WeightSync,
        config: Config,
        mesh: Mesh,
        judges: Judges,
        *,
        sampled_policy: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Take over a fleet. sampled_policy: an engine has the weights that steps draw with."""
        self.fleet = fleet
        self._sampled_policy = sampled_policy
        self.sync = sync
        self._mesh = mesh
        self._judges = judges
        self._leads = users_of(config, mesh).here
        self._sleeps = sleeps(config, device_type=mesh.device.type)
        self._share_gpus = config.rollout.mode == "colocated" and mesh.device.type == "cuda"

    def bring(self, version: int, timers: Timers) -> dict[str, float]:
        """Let the replicas draw a step's samples from a version of the weights; timed.

        Returns the sync's figures. Raises AgreedError when a replica refuses or differs.
        """
        with timers("room"):
            self._make_room()
        with timers("sync"), self._sampled_policy():
            return self.sync.push(version)

    def wake(self, version: int) -> None:
        """Bring all replicas to a version of the weights; they stay awake."""
        self._make_room()
        self.sync.push(version)

    def rest(self) -> None:
        """Let the replicas free their weights' memory where rollout.sleep says so.

        The next push then brings every weight, and wakes them. Where they do not sleep, they give
        back what sampling needed.
        """
        if self._sleeps:
            agreed(self.fleet.sleep, self._mesh.cpu_group, here=self._leads)
            self.sync.forget()
        else:
            self.trim()
        self._judges.sleep()

    def trim(self) -> None:
        """Give the trainer what the replicas' allocators keep of the last samples, on its GPUs."""
        if self._share_gpus:
            agreed(self.fleet.trim, self._mesh.cpu_group, here=self._leads)

    def _make_room(self) -> None:
        """Give the replicas what this rank's allocator keeps, an update's peak at most."""
        if self._share_gpus:
            agreed(torch.cuda.empty_cache, self._mesh.cpu_group)
        self._judges.wake()


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


def launch(config: Config, mesh: Mesh, folder: Path) -> list[ReplicaProcess]:
    """Start a colocated run's processes on each node's first rank; return at once. Collective.

    Returns [] on the other ranks.
    """
    if config.rollout.mode != "colocated":
        return []

    token = read_once(
        lambda: fresh_token(folder), source=0, group=mesh.cpu_group, world=mesh.cpu_group
    )
    here = mesh.rank == mesh.node_source
    return agreed(lambda: _launch(config, mesh, folder, token), mesh.cpu_group, here=here) or []


def fresh_token(folder: Path) -> str:
    """Return the token of all replicas that the run starts; removes an earlier attempt's.

    It is MEGADIFF_TOKEN, or drawn and written where the run's user alone can read it.
    """
    registry = registry_folder(folder)
    shutil.rmtree(registry, ignore_errors=True)
    # Without one anybody on a host could put its replicas to sleep, or push to them.
    return environment_token() or write_token(registry)


def connect(config: Config, mesh: Mesh, folder: Path, processes: Sequence[ReplicaProcess]) -> Fleet:
    """Wait until the replicas are healthy, and give the ranks that share them clients. Collective.

    Raises AgreedError for a separate replica that computes otherwise than the run says.
    """
    rollout = config.rollout
    users = users_of(config, mesh)
    is_colocated = users.node is not None
    registry = registry_folder(folder, users.node) if is_colocated else Path(rollout.registry)

    # Every rank gets the source's token: a run may have drawn its own, which no environment holds.
    world = mesh.cpu_group
    run = read_once(lambda: run_id(config, folder), source=0, group=world, world=world)
    token = read_once(
        lambda: processes[0].token if processes else environment_token(),
        source=users.source,
        group=users.group,
        world=world,
    )

    def announcements() -> list[dict[str, Any]]:
        healthy = wait_until_announced(
            registry,
            count=num_replicas(config, mesh),
            timeout_s=rollout.start_timeout_s,
            processes=processes,
            token=token,
            run=run,
        )
        for replica in healthy:
            check_arithmetic(replica, config)
        return healthy

    announced = read_once(announcements, source=users.source, group=users.group, world=world)
    clients = [
        ReplicaClient(
            replica["url"],
            replica["name"],
            timeout_s=rollout.request_timeout_s,
            token=token,
            run=run,
        )
        for replica in announced
    ]
    return Fleet(
        clients,
        batch_size=rollout.batch_size,
        processes=processes,
        logs={client.name: log_file(folder, client.name) for client in clients if is_colocated},
        rank=users.dp_rank,
        num_ranks=users.dp,
        holds_replicas=users.here and not is_colocated,  # colocated ones end with their run
    )


def run_id(config: Config, folder: Path) -> str:
    """Return the run's name and 8 hex digits, which are drawn once and kept in its folder.

    By it a replica tells its owner from another run. Neither name nor path is in the file, but both
    are in the id: a copied folder is another run. Rank 0 calls it, under the run's lock.
    """
    path = folder / RUN_ID_FILE
    digits = path.read_text(encoding="utf-8", errors="replace").strip() if path.is_file() else ""
    if not re.fullmatch("[0-9a-f]{8}", digits):
        digits = secrets.token_hex(4)
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, f"{digits}\n")
    of_folder = hashlib.sha256(f"{digits}{folder.resolve()}".encode()).hexdigest()[:8]
    name = quote(config.run.name, safe="")[:RUN_NAME_CHARS]  # it travels in a header
    return f"{name}-{of_folder}"


def check_arithmetic(replica: Mapping[str, Any], config: Config) -> None:
    """Raise ValueError where a replica computes otherwise than the run says.

    That would show as a parity gap without a cause. replica: its name, url and health.
    """
    who = f"{replica['name']} at {replica['url']}"
    arithmetic = replica["health"].get("arithmetic")
    if not isinstance(arithmetic, dict):
        raise ValueError(
            f"{who} does not say how it computes; start it with this version of megadiff"
        )

    for key in ("rollout.fp8", "model.float32_streams"):
        value = attrgetter(key)(config)
        switch = key.partition(".")[2]
        # by identity: a 1 in JSON must not pass for true
        if arithmetic.get(switch) is not value:
            flag = f"{'with' if value else 'without'} {flag_of(switch)}"
            raise ValueError(
                f"{who} has {switch}={arithmetic.get(switch)}, the run {key}={value}; "
                f"start it {flag}, or set {key}={str(not value).lower()}"
            )


def weights_folder(config: Config, mesh: Mesh, folder: Path) -> Path:
    """Return where sync.transport=disk writes: sync.folder, or weights/ in the run's folder.

    Each node of a colocated run writes a folder of its own there.
    """
    weights = Path(config.sync.folder) if config.sync.folder else folder / "weights"
    node = users_of(config, mesh).node
    return weights / f"node_{node}" if node is not None and mesh.num_nodes > 1 else weights


def registry_folder(folder: Path, node: int | None = None) -> Path:
    """Return where a colocated run's replicas are announced: all nodes' folder, or a node's."""
    replicas = folder / "replicas"
    return replicas if node is None else replicas / f"node_{node}"


def log_file(folder: Path, name: str) -> Path:
    return folder / "logs" / f"{name}.log"


def _launch(config: Config, mesh: Mesh, folder: Path, token: str) -> list[ReplicaProcess]:
    if config.sync.transport == "disk":
        # Else replicas would load an older state before they get this one.
        clear(weights_folder(config, mesh, folder))
    count = num_replicas(config, mesh)
    gpus = _gpus(config, mesh, count)
    num_threads = _num_threads(config, count)

    processes = []
    for index in range(count):
        name = f"replica_{mesh.node * count + index}"
        processes.append(
            ReplicaProcess(
                replica_spec(config, mesh, folder, name=name),
                log=log_file(folder, name),
                num_threads=num_threads,
                gpus=gpus[index],
                token=token,
            )
        )
    return processes


def replica_spec(config: Config, mesh: Mesh, folder: Path, *, name: str) -> ReplicaSpec:
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
        parent_pid=os.getpid(),
        fp8_in_place=config.rollout.fp8 and sleeps(config, device_type=device_type),
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


def _num_threads(config: Config, count: int) -> int:
    """Return the threads of each replica: those of this node's ranks, divided.

    Trainer and replicas take turns. Threads beyond that spin while they wait for one another.
    """
    num_threads = torch.get_num_threads() * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, num_threads // (count * config.rollout.tp))
