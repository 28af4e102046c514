"""Which transport serves a run's replicas, from where trainer ranks and replica workers run."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megadiff.sync.transports.base import HttpTransport, Transport, WeightTarget
from megadiff.sync.transports.cuda_ipc import CudaIpcTransport
from megadiff.sync.transports.disk import DiskTransport
from megadiff.sync.transports.group import GroupTransport
from megadiff.sync.transports.shared_memory import SharedMemoryTransport

logger = logging.getLogger(__name__)
TRANSPORTS = ("http", "shm", "nccl", "disk")
Workers = Mapping[str, Sequence[Mapping[str, Any]]]  # replica → of each worker: host, device, boxes


def build_transport(
    name: str,
    targets: Sequence[WeightTarget],
    workers: Workers,
    *,
    ranks: Sequence[Mapping[str, str]],
    rank: int,
    device: torch.device,
    folder: Path,
) -> Transport:
    """sync.transport's end on this trainer rank, with the replicas that it sends to.

    targets: all replicas of the run. ranks: host and device of each trainer rank; device: this one's. folder: of transport
    disk. Raises ValueError for places that the transport cannot serve, the same on every rank.
    """
    if name == "auto":
        name = _fastest(workers, ranks=ranks)
    if name not in TRANSPORTS:
        raise ValueError(f"sync.transport: transport {name!r} is none of {', '.join(TRANSPORTS)}")
    if name == "shm":
        return _shared(targets, workers, ranks=ranks, rank=rank, device=device)
    if name == "nccl":
        _check_group(workers, ranks[0])
    if rank != 0:
        return HttpTransport([])  # to nobody: rank 0 sends
    if name == "nccl":
        return GroupTransport(
            targets, device=device, num_workers=[len(workers[target.name]) for target in targets]
        )
    return DiskTransport(targets, folder=folder) if name == "disk" else HttpTransport(targets)


def _fastest(workers: Workers, *, ranks: Sequence[Mapping[str, str]]) -> str:
    """Memory that both sides see where every replica is one worker on a rank's GPU, else NCCL between GPUs, else HTTP."""
    held = {(rank["host"], rank["device"]) for rank in ranks}
    places = [[(one["host"], one["device"]) for one in many] for many in workers.values()]
    if any(device == "cpu" for _, device in [*held, *(place for many in places for place in many)]):
        return "http"
    if len({host for host, _ in held}) == 1 and all(
        len(many) == 1 and many[0] in held for many in places
    ):
        return "shm"
    members = [
        (ranks[0]["host"], ranks[0]["device"]),
        *(place for many in places for place in many),
    ]
    return "nccl" if len(set(members)) == len(members) else "http"


def _shared(
    targets: Sequence[WeightTarget],
    workers: Workers,
    *,
    ranks: Sequence[Mapping[str, str]],
    rank: int,
    device: torch.device,
) -> Transport:
    """GPU memory where every replica has one worker and a rank shares its GPU; else files in the host's memory."""
    for target in targets:
        for worker in workers[target.name]:
            if worker["host"] != ranks[0]["host"]:
                raise ValueError(
                    f"sync.transport=shm, but {target.name} runs on {worker['host']} and the trainer on {ranks[0]['host']}; "
                    "set sync.transport=nccl, http or disk"
                )
    devices = {target.name: workers[target.name][0]["device"] for target in targets}
    if set(devices.values()) == {"cpu"} or any(len(workers[target.name]) > 1 for target in targets):
        return SharedMemoryTransport(targets if rank == 0 else [])
    senders = {place["device"]: number for number, place in reversed(list(enumerate(ranks)))}
    apart = [name for name, used in devices.items() if used not in senders]
    if apart:
        raise ValueError(
            f"sync.transport=shm, but {', '.join(apart)} run on GPUs that no trainer rank has; set sync.transport=nccl"
        )
    return CudaIpcTransport(
        [one for one in targets if senders[devices[one.name]] == rank], device=device
    )


def _check_group(workers: Workers, sender: Mapping[str, str]) -> None:
    """Raises ValueError where NCCL refuses: two members on one GPU, or GPUs together with CPUs."""
    places = {
        f"{name} (worker {n})": one["device"]
        for name, many in workers.items()
        for n, one in enumerate(many)
    }
    places = {"the trainer's rank 0": sender["device"], **places}
    kinds = {device.partition(":")[0] for device in places.values()}
    if len(kinds) > 1:
        raise ValueError(
            f"sync.transport=nccl between {' and '.join(sorted(kinds))}; run both on GPUs, or set sync.transport=http"
        )
    held: dict[str, str] = {}
    for name, device in places.items():
        if device != "cpu" and device in held:
            raise ValueError(
                f"sync.transport=nccl, but {held[device]} and {name} share a GPU, which NCCL does not allow; set "
                "sync.transport=shm, which is faster there, or http"
            )
        held[device] = name
