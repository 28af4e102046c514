"""The run's replicas: launched on the trainer's own devices (colocated) or found in a registry (separate)."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch

from megadiff.config.schema import Config
from megadiff.config.validate import sleeps
from megadiff.parallel.collectives import agreed, broadcast_json
from megadiff.parallel.mesh import Mesh
from megadiff.rollout.client.client import ReplicaClient
from megadiff.rollout.client.fleet import Fleet
from megadiff.rollout.client.processes import (
    ReplicaProcess,
    ReplicaSpec,
    environment_token,
    write_token,
)
from megadiff.rollout.client.registry import wait_until_announced
from megadiff.sync.sync import WeightSync
from megadiff.sync.transports.disk import clear

logger = logging.getLogger(__name__)
RUN_NAME_CHARS = 100  # of an id, which has RUN_CHARS of rollout.limits at most
RUN_ID_FILE = "run_id"  # in the run's folder


def check_placement(config: Config, *, world_size: int) -> None:
    """Raises ValueError for a colocated run over several nodes: its replicas would all start on the first one."""
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))
    if config.rollout.mode == "colocated" and local_world_size < world_size:
        raise ValueError(
            f"rollout.mode=colocated starts replicas on one node, but {world_size} ranks run {local_world_size} a node; "
            "start `megadiff serve MODEL --host ADDRESS --registry DIR` on every node and set rollout.mode=separate "
            "rollout.registry=DIR rollout.num_replicas=N"
        )


def num_replicas(config: Config, mesh: Mesh) -> int:
    """rollout.num_replicas; 0 means one per rollout.tp GPUs that the trainer uses, and one on CPU."""
    on_gpus = max(1, mesh.world_size // config.rollout.tp)
    return config.rollout.num_replicas or (on_gpus if mesh.device.type == "cuda" else 1)


def launch(config: Config, mesh: Mesh, folder: Path) -> list[ReplicaProcess]:
    """On rank 0 of a colocated run: starts the processes and returns at once. Elsewhere: nothing. Collective."""
    here = mesh.rank == 0 and config.rollout.mode == "colocated"
    return agreed(lambda: _launch(config, mesh, folder), mesh.cpu_group, here=here) or []


def connect(config: Config, mesh: Mesh, folder: Path, processes: Sequence[ReplicaProcess]) -> Fleet:
    """Collective. Rank 0 waits until the replicas are healthy, then every rank gets clients to all of them. Raises
    AgreedError for a separate replica that computes otherwise than the run says."""
    rollout = config.rollout
    registry = registry_folder(folder) if rollout.mode == "colocated" else Path(rollout.registry)
    here = mesh.rank == 0
    access = agreed(lambda: _access(config, folder, processes), mesh.cpu_group, here=here)
    # Every rank gets rank 0's token: a run may have drawn its own, which no environment holds.
    access = broadcast_json(access, source=0, group=mesh.cpu_group)
    found = agreed(
        lambda: _found(registry, config, mesh, processes, access), mesh.cpu_group, here=here
    )
    found = broadcast_json(found, source=0, group=mesh.cpu_group)
    clients = [
        ReplicaClient(
            replica["url"], replica["name"], timeout_s=rollout.request_timeout_s, **access
        )
        for replica in found  # type: ignore[union-attr]  # rank 0's list
    ]
    logs = (
        {client.name: log_file(folder, client.name) for client in clients}
        if rollout.mode == "colocated"
        else {}
    )
    return Fleet(
        clients,
        batch_size=rollout.batch_size,
        processes=processes,
        logs=logs,
        rank=mesh.dp_rank,
        num_ranks=mesh.dp,
        holds_replicas=mesh.rank == 0 and rollout.mode == "separate",  # others end with their run
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
        aside = path.with_name(f".{RUN_ID_FILE}.{os.getpid()}")
        aside.write_text(f"{digits}\n", encoding="utf-8")
        os.replace(aside, path)  # a run that is killed here leaves a whole file or none
    of_folder = hashlib.sha256(f"{digits}{folder.resolve()}".encode()).hexdigest()[:8]
    name = quote(config.run.name, safe="")[:RUN_NAME_CHARS]  # it travels in a header
    return f"{name}-{of_folder}"


def _access(
    config: Config, folder: Path, processes: Sequence[ReplicaProcess]
) -> dict[str, str | None]:
    """Return what clients need to be let in: the run's id, and its replicas' token."""
    token = processes[0].token if processes else environment_token()
    return {"run": run_id(config, folder), "token": token}


def _found(
    registry: Path,
    config: Config,
    mesh: Mesh,
    processes: Sequence[ReplicaProcess],
    access: Mapping[str, Any],
) -> list[Mapping[str, Any]]:
    count, timeout_s = num_replicas(config, mesh), config.rollout.start_timeout_s
    found = wait_until_announced(
        registry, count=count, timeout_s=timeout_s, processes=processes, **access
    )
    for one in found:
        check_arithmetic(one, config)
    return found


def check_arithmetic(replica: Mapping[str, Any], config: Config) -> None:
    """replica: its name, url and health. Raises ValueError where it computes otherwise than the run says, which would show as
    a parity gap without a cause."""
    wanted = {
        "rollout.fp8": config.rollout.fp8,
        "model.float32_streams": config.model.float32_streams,
    }
    who, found = f"{replica['name']} at {replica['url']}", replica["health"].get("arithmetic")
    if not isinstance(found, dict):
        raise ValueError(
            f"{who} does not say how it computes; start it with this version of megadiff"
        )
    for key, value in wanted.items():
        switch = key.partition(".")[2]
        if found.get(switch) is not value:
            flag = f"{'with' if value else 'without'} --{switch.replace('_', '-')}"
            raise ValueError(
                f"{who} has {switch}={found.get(switch)}, the run {key}={value}; start it {flag}, or set "
                f"{key}={str(not value).lower()}"
            )


def put_to_sleep(fleet: Fleet, sync: WeightSync, config: Config, mesh: Mesh) -> None:
    """Collective. Where rollout.sleep says so, replicas free their weights' memory; the next push, which then brings every
    weight of the policy, wakes them. Elsewhere on shared GPUs they give back what sampling needed."""
    if sleeps(config, device_type=mesh.device.type):
        agreed(fleet.sleep, mesh.cpu_group, here=mesh.rank == 0)
        sync.forget()
    else:
        trim(fleet, config, mesh)


def trim(fleet: Fleet, config: Config, mesh: Mesh) -> None:
    """Collective. Replicas on the trainer's GPUs give back what their allocators keep of the last samples."""
    if _shares_gpus(config, mesh):
        agreed(fleet.trim, mesh.cpu_group, here=mesh.rank == 0)


def make_room(config: Config, mesh: Mesh) -> None:
    """Collective. Before replicas on the same GPUs take memory for a push, every rank gives back what its allocator keeps of
    what came before, an update's peak at most."""
    if _shares_gpus(config, mesh):
        agreed(torch.cuda.empty_cache, mesh.cpu_group)


def _shares_gpus(config: Config, mesh: Mesh) -> bool:
    return config.rollout.mode == "colocated" and mesh.device.type == "cuda"


def weights_folder(config: Config, folder: Path) -> Path:
    """Where sync.transport=disk writes: sync.folder, or weights/ in the run's folder."""
    return Path(config.sync.folder) if config.sync.folder else folder / "weights"


def registry_folder(folder: Path) -> Path:
    return folder / "replicas"


def log_file(folder: Path, name: str) -> Path:
    return folder / "logs" / f"{name}.log"


def _launch(config: Config, mesh: Mesh, folder: Path) -> list[ReplicaProcess]:
    registry = registry_folder(folder)
    shutil.rmtree(registry, ignore_errors=True)
    if config.sync.transport == "disk":
        clear(
            weights_folder(config, folder)
        )  # else replicas would load an older state before they get this one
    specs = _specs(config, mesh, folder)
    # Without a token anybody on this host could put the replicas to sleep, or push to them.
    token = environment_token() or write_token(registry)
    return [ReplicaProcess(spec, registry, token=token) for spec in specs]


def _specs(config: Config, mesh: Mesh, folder: Path) -> list[ReplicaSpec]:
    """GPUs in turn; on CPU the threads of this node's ranks are divided among the replicas: they take turns, and threads
    that wait for one another spin."""
    count, tp = num_replicas(config, mesh), config.rollout.tp
    num_threads = torch.get_num_threads() * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    num_gpus = torch.cuda.device_count() if mesh.device.type == "cuda" else 0
    if num_gpus and tp > num_gpus:
        raise ValueError(
            f"rollout.tp={tp} on {num_gpus} GPUs: each worker needs one; set rollout.tp<={num_gpus}"
        )
    if num_gpus and count * tp > num_gpus:
        logger.warning(
            "rollout.num_replicas*tp = %d*%d on %d GPUs: some GPUs hold several",
            count,
            tp,
            num_gpus,
        )
    return [
        ReplicaSpec(
            name=f"replica_{index}",
            model=Path(config.model.path),
            dtype=config.model.dtype,
            device=mesh.device.type,
            gpus=tuple((index * tp + worker) % num_gpus for worker in range(tp))
            if num_gpus
            else (),
            log=log_file(folder, f"replica_{index}"),
            num_threads=max(1, num_threads // (count * tp)),
            compile=config.rollout.compile,
            fp8=config.rollout.fp8,
            fp8_in_place=config.rollout.fp8 and sleeps(config, device_type=mesh.device.type),
            float32_streams=config.model.float32_streams,
            tp=tp,
            weights=weights_folder(config, folder) if config.sync.transport == "disk" else None,
        )
        for index in range(count)
    ]
