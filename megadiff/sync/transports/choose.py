"""Choose the transport to a run's replicas, from where trainer ranks and replica workers run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from megadiff.config.rollout import HEARTBEAT_S
from megadiff.sync.transports.base import HttpTransport, PushTarget, Transport
from megadiff.sync.transports.cuda_ipc import CudaIpcTransport
from megadiff.sync.transports.disk import DiskTransport
from megadiff.sync.transports.group import GroupTransport
from megadiff.sync.transports.shared_memory import SharedMemoryTransport
from megadiff.sync.transports.table import OPTIONS

Workers = Mapping[str, Sequence[Mapping[str, Any]]]  # replica → of each worker: host, device, boxes


def build_transport(
    name: str,
    targets: Sequence[PushTarget],
    workers: Workers,
    *,
    ranks: Sequence[Mapping[str, str]],
    rank: int,
    device: torch.device,
    folder: Path,
    heartbeat_s: float = HEARTBEAT_S,
) -> Transport:
    """Return sync.transport's end on this trainer rank, with the replicas that it sends to.

    targets: the replicas that this rank shares. ranks: host and device of each trainer rank that
    shares them; rank: this one's number among those; device: its own. folder: of transport disk.
    heartbeat_s: after which the run loses a replica that hangs.
    Raises ValueError for devices that the transport cannot serve, the same on every rank.
    """
    if name == "auto":
        name = _fastest(workers, ranks=ranks)
        # Who put TLS in front of a replica does not want its weights in clear text.
        if name == "nccl" and any(target.url.startswith("https:") for target in targets):
            name = "http"
    if name not in OPTIONS:
        raise ValueError(f"sync.transport: transport {name!r} is none of {', '.join(OPTIONS)}")

    if name == "shm":
        return _shared(targets, workers, ranks=ranks, rank=rank, device=device)
    if name == "nccl":
        # Before rank 0 goes a way of its own: every rank must raise the same error.
        _check_group(workers, ranks[0])

    if name == "http":
        # All ranks have every bucket: each sends to its part of the replicas.
        return HttpTransport(targets[rank :: len(ranks)])
    if rank != 0:
        return HttpTransport([])  # to nobody: rank 0 sends

    if name == "nccl":
        num_workers = [len(workers[target.name]) for target in targets]
        return GroupTransport(
            targets, device=device, num_workers=num_workers, heartbeat_s=heartbeat_s
        )
    return DiskTransport(targets, folder=folder)


def _fastest(workers: Workers, *, ranks: Sequence[Mapping[str, str]]) -> str:
    """Return the fastest transport that can serve all replicas.

    That is memory that both sides see where every replica is one worker on a rank's GPU, else NCCL
    between GPUs, else HTTP.
    """
    trainer = [(rank["host"], rank["device"]) for rank in ranks]
    replicas = []
    for replica_workers in workers.values():
        replicas.append([(worker["host"], worker["device"]) for worker in replica_workers])
    all_workers = list(chain.from_iterable(replicas))

    if any(device == "cpu" for _, device in trainer + all_workers):
        return "http"

    is_one_host = len({host for host, _ in trainer}) == 1
    if is_one_host and all(len(gpus) == 1 and gpus[0] in trainer for gpus in replicas):
        return "shm"

    members = [trainer[0], *all_workers]
    # NCCL takes a GPU only once.
    return "nccl" if len(set(members)) == len(members) else "http"


def _shared(
    targets: Sequence[PushTarget],
    workers: Workers,
    *,
    ranks: Sequence[Mapping[str, str]],
    rank: int,
    device: torch.device,
) -> Transport:
    """Return GPU memory where every replica has one worker and a rank shares its GPU.

    Elsewhere it is files in the host's memory.
    """
    trainer_host = ranks[0]["host"]
    for target in targets:
        for worker in workers[target.name]:
            if worker["host"] != trainer_host:
                raise ValueError(
                    f"sync.transport=shm, but {target.name} runs on {worker['host']} and the "
                    f"trainer on {trainer_host}; set sync.transport=nccl, http or disk"
                )

    devices = {target.name: workers[target.name][0]["device"] for target in targets}
    has_several = any(len(workers[target.name]) > 1 for target in targets)
    if set(devices.values()) == {"cpu"} or has_several:
        return SharedMemoryTransport(targets if rank == 0 else [])

    senders: dict[str, int] = {}
    for sender, row in enumerate(ranks):
        senders.setdefault(row["device"], sender)  # the first of the ranks on a GPU sends
    apart = [name for name, gpu in devices.items() if gpu not in senders]
    if apart:
        raise ValueError(
            f"sync.transport=shm, but {', '.join(apart)} run on GPUs that no trainer rank has; "
            "set sync.transport=nccl"
        )

    nearby = [target for target in targets if senders[devices[target.name]] == rank]
    return CudaIpcTransport(nearby, device=device)


def _check_group(workers: Workers, sender: Mapping[str, str]) -> None:
    """Raise ValueError where NCCL refuses: two members on one GPU, or GPUs together with CPUs."""
    devices = {"the trainer's rank 0": sender["device"]}
    for name, replica_workers in workers.items():
        for number, worker in enumerate(replica_workers):
            devices[f"{name} (worker {number})"] = worker["device"]

    kinds = {device.partition(":")[0] for device in devices.values()}
    if len(kinds) > 1:
        raise ValueError(
            f"sync.transport=nccl between {' and '.join(sorted(kinds))}; run both on GPUs, or set "
            "sync.transport=http"
        )

    members: dict[str, str] = {}
    for member, device in devices.items():
        # On CPUs the group is gloo's, which has no such limit.
        if device != "cpu" and device in members:
            raise ValueError(
                f"sync.transport=nccl, but {members[device]} and {member} share a GPU, which NCCL "
                "does not allow; set sync.transport=shm, which is faster there, or http"
            )
        members[device] = member
