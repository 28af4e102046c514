"""The run's replicas: started on the trainer's own devices (colocated), or found in a registry."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch

from megadiff.config.schema import Config
from megadiff.config.validate import sleeps
from megadiff.observe.text_files import write_whole
from megadiff.observe.timers import Timers
from megadiff.parallel.collectives import agreed, broadcast_json
from megadiff.parallel.mesh import Mesh
from megadiff.rollout.client.client import ReplicaClient
from megadiff.rollout.client.fleet import Fleet
from megadiff.rollout.client.processes import ReplicaProcess, environment_token, write_token
from megadiff.rollout.client.registry import wait_until_announced
from megadiff.rollout.spec import ReplicaSpec, config_spec, flag_of
from megadiff.sync.sync import WeightSync
from megadiff.sync.transports.disk import clear

logger = logging.getLogger(__name__)
RUN_NAME_CHARS = 100  # of an id, which has RUN_CHARS of rollout.limits at most
RUN_ID_FILE = "run_id"  # in the run's folder


class RunReplicas:
    """Decide who has the GPUs: the replicas, or the trainer. All methods are collective."""

    def __init__(self, fleet: Fleet, sync: WeightSync, config: Config, mesh: Mesh) -> None:
        self.fleet = fleet
        self.sync = sync
        self._mesh = mesh
        self._sleeps = sleeps(config, device_type=mesh.device.type)
        self._share_gpus = config.rollout.mode == "colocated" and mesh.device.type == "cuda"

    @contextmanager
    def awake(self, version: int, timers: Timers) -> Iterator[dict[str, float]]:
        """Let the replicas sample from a version of the weights, and then rest; timed.

        Yields the sync's figures. Raises AgreedError when a replica refuses or differs.
        """
        with timers("room"):
            self._make_room()
        with timers("sync"):
            figures = self.sync.push(version)
        yield figures
        # In no `finally`: after an error the other ranks may never come to this collective.
        with timers("room"):
            self.rest()

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
            agreed(self.fleet.sleep, self._mesh.cpu_group, here=self._mesh.rank == 0)
            self.sync.forget()
        else:
            self.trim()

    def trim(self) -> None:
        """Give the trainer what the replicas' allocators keep of the last samples, on its GPUs."""
        if self._share_gpus:
            agreed(self.fleet.trim, self._mesh.cpu_group, here=self._mesh.rank == 0)

    def _make_room(self) -> None:
        """Give the replicas what this rank's allocator keeps, an update's peak at most."""
        if self._share_gpus:
            agreed(torch.cuda.empty_cache, self._mesh.cpu_group)


def check_placement(config: Config, *, world_size: int) -> None:
    """Raise ValueError for a colocated run over several nodes.

    Its replicas would all start on the first one.
    """
    # torchrun's: the ranks of this node
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))
    if config.rollout.mode == "colocated" and local_world_size < world_size:
        raise ValueError(
            f"rollout.mode=colocated starts replicas on one node, but {world_size} ranks run "
            f"{local_world_size} a node; start `megadiff serve MODEL --host ADDRESS "
            "--registry DIR` on every node and set rollout.mode=separate rollout.registry=DIR "
            "rollout.num_replicas=N"
        )


def num_replicas(config: Config, mesh: Mesh) -> int:
    """Return rollout.num_replicas; 0 means one per rollout.tp GPUs of the trainer, one on CPU."""
    on_gpus = max(1, mesh.world_size // config.rollout.tp)
    return config.rollout.num_replicas or (on_gpus if mesh.device.type == "cuda" else 1)


def launch(config: Config, mesh: Mesh, folder: Path) -> list[ReplicaProcess]:
    """Start the processes of a colocated run on rank 0, and return at once. Collective.

    Returns [] on the other ranks.
    """
    here = mesh.rank == 0 and config.rollout.mode == "colocated"
    return agreed(lambda: _launch(config, mesh, folder), mesh.cpu_group, here=here) or []


def connect(config: Config, mesh: Mesh, folder: Path, processes: Sequence[ReplicaProcess]) -> Fleet:
    """Wait on rank 0 until the replicas are healthy, and give every rank clients. Collective.

    Raises AgreedError for a separate replica that computes otherwise than the run says.
    """
    rollout = config.rollout
    is_colocated = rollout.mode == "colocated"
    registry = registry_folder(folder) if is_colocated else Path(rollout.registry)
    here = mesh.rank == 0

    access = agreed(lambda: _access(config, folder, processes), mesh.cpu_group, here=here)
    # Every rank gets rank 0's token: a run may have drawn its own, which no environment holds.
    access = broadcast_json(access, source=0, group=mesh.cpu_group)

    def announcements() -> list[dict[str, Any]]:
        healthy = wait_until_announced(
            registry,
            count=num_replicas(config, mesh),
            timeout_s=rollout.start_timeout_s,
            processes=processes,
            **access,
        )
        for replica in healthy:
            check_arithmetic(replica, config)
        return healthy

    announced = agreed(announcements, mesh.cpu_group, here=here)
    clients = [
        ReplicaClient(
            replica["url"], replica["name"], timeout_s=rollout.request_timeout_s, **access
        )
        for replica in broadcast_json(announced, source=0, group=mesh.cpu_group)
    ]
    return Fleet(
        clients,
        batch_size=rollout.batch_size,
        processes=processes,
        logs={client.name: log_file(folder, client.name) for client in clients if is_colocated},
        rank=mesh.dp_rank,
        num_ranks=mesh.dp,
        holds_replicas=here and not is_colocated,  # colocated ones end with their run
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


def _access(
    config: Config, folder: Path, processes: Sequence[ReplicaProcess]
) -> dict[str, str | None]:
    """Return what clients need to be let in: the run's id, and its replicas' token."""
    token = processes[0].token if processes else environment_token()
    return {"run": run_id(config, folder), "token": token}


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


def weights_folder(config: Config, folder: Path) -> Path:
    """Return where sync.transport=disk writes: sync.folder, or weights/ in the run's folder."""
    return Path(config.sync.folder) if config.sync.folder else folder / "weights"


def registry_folder(folder: Path) -> Path:
    return folder / "replicas"


def log_file(folder: Path, name: str) -> Path:
    return folder / "logs" / f"{name}.log"


def _launch(config: Config, mesh: Mesh, folder: Path) -> list[ReplicaProcess]:
    registry = registry_folder(folder)
    shutil.rmtree(registry, ignore_errors=True)  # dead replicas of an earlier start
    if config.sync.transport == "disk":
        # Else replicas would load an older state before they get this one.
        clear(weights_folder(config, folder))
    count = num_replicas(config, mesh)
    gpus = _gpus(config, mesh, count)
    num_threads = _num_threads(config, count)

    # Without a token anybody on this host could put the replicas to sleep, or push to them.
    token = environment_token() or write_token(registry)

    return [
        ReplicaProcess(
            replica_spec(config, mesh, folder, name=f"replica_{index}"),
            log=log_file(folder, f"replica_{index}"),
            num_threads=num_threads,
            gpus=gpus[index],
            token=token,
        )
        for index in range(count)
    ]


def replica_spec(config: Config, mesh: Mesh, folder: Path, *, name: str) -> ReplicaSpec:
    """Return how a replica of a colocated run is started."""
    device_type = mesh.device.type
    return config_spec(
        config,
        name=name,
        # any free one; its announcement tells which
        port=0,
        device="cuda" if device_type == "cuda" else "cpu",
        registry=registry_folder(folder),
        weights=weights_folder(config, folder) if config.sync.transport == "disk" else None,
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
