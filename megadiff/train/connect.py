"""Find a run's replicas when it starts, and give every rank clients of those that it shares."""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any
from urllib.parse import quote

from megadiff.config.schema import Config
from megadiff.config.validate import sleeps
from megadiff.observe.text_files import write_whole
from megadiff.parallel.collectives import read_once
from megadiff.parallel.mesh import Mesh
from megadiff.rollout.client.client import ReplicaClient
from megadiff.rollout.client.fleet import Fleet
from megadiff.rollout.client.members import Members
from megadiff.rollout.client.processes import ReplicaProcess, environment_token
from megadiff.rollout.client.registry import RegistryWatch, wait_until_announced
from megadiff.rollout.client.report import Report, no_report
from megadiff.rollout.client.supervisor import Supervisor
from megadiff.rollout.spec import flag_of
from megadiff.train.replicas import log_file, num_replicas, registry_folder, users_of

RUN_NAME_CHARS = 100  # of an id, which has RUN_CHARS of rollout.limits at most
RUN_ID_FILE = "run_id"  # in the run's folder


@dataclass(frozen=True, kw_only=True)
class Connection:
    """A run's replicas as one rank sees them at the start.

    supervisor: on the rank that watches them, None elsewhere. make_client: of a name and an
    address, with the run's token.
    """

    fleet: Fleet
    supervisor: Supervisor | None
    make_client: Callable[[str, str], ReplicaClient]


def connect(
    config: Config,
    mesh: Mesh,
    folder: Path,
    processes: Sequence[ReplicaProcess],
    stack: ExitStack,
    *,
    report: Report = no_report,
) -> Connection:
    """Wait until the replicas are healthy, and give the ranks that share them clients. Collective.

    Connections are closed when `stack` is. report: told of what happens to replicas.
    Raises AgreedError for a separate replica that computes otherwise than the run says.
    """
    rollout = config.rollout
    users = users_of(config, mesh)
    is_colocated = users.node is not None
    registry = registry_folder(folder, users.node) if is_colocated else Path(rollout.registry)

    world = mesh.cpu_group
    # Every rank gets the source's token: a run may have drawn its own, which no environment holds.
    run = read_once(lambda: run_id(config, folder), source=0, group=world, world=world)
    token = read_once(
        lambda: processes[0].token if processes else environment_token(),
        source=users.source,
        group=users.group,
        world=world,
    )

    def make_client(name: str, url: str) -> ReplicaClient:
        return ReplicaClient(url, name, timeout_s=rollout.request_timeout_s, token=token, run=run)

    def announcements() -> dict[str, str]:
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
        return {replica["name"]: replica["url"] for replica in healthy}

    announced = read_once(announcements, source=users.source, group=users.group, world=world)
    fleet = Fleet(
        [make_client(name, url) for name, url in announced.items()],
        batch_size=rollout.batch_size,
        logs={name: log_file(folder, name) for name in announced if is_colocated},
        rank=users.dp_rank,
        num_ranks=users.dp,
        num_replicas=num_replicas(config, mesh),
        heartbeat_s=None if users.here else rollout.heartbeat_s,  # the supervisor's pulse is enough
        report=report,
    )
    stack.enter_context(fleet)
    if not users.here:
        return Connection(fleet=fleet, supervisor=None, make_client=make_client)

    supervisor = _supervisor(
        config,
        mesh,
        RegistryWatch(registry, token=token, run=run),
        announced,
        processes,
        fleet=fleet,
        make_client=make_client,
    )
    stack.enter_context(supervisor)
    return Connection(fleet=fleet, supervisor=supervisor, make_client=make_client)


def _supervisor(
    config: Config,
    mesh: Mesh,
    registry: RegistryWatch,
    announced: Mapping[str, str],
    processes: Sequence[ReplicaProcess],
    *,
    fleet: Fleet,
    make_client: Callable[[str, str], ReplicaClient],
) -> Supervisor:
    """Return what watches the announced replicas, name → url, from this rank."""
    rollout = config.rollout
    members = Members([process.name for process in processes], max_restarts=rollout.max_restarts)
    for name, url in announced.items():
        members.join(name, url, time.monotonic())
    return Supervisor(
        registry=registry,
        members=members,
        make_client=make_client,
        fleet=fleet,
        heartbeat_s=rollout.heartbeat_s,
        start_timeout_s=rollout.start_timeout_s,
        min_replicas=min(rollout.min_replicas, num_replicas(config, mesh)),
        processes={process.name: process for process in processes},
        check=partial(check_arithmetic, config=config),
        restarts_any_time=not sleeps(config, device_type=mesh.device.type),
        releases=rollout.mode == "separate",  # colocated ones end with their run
        report=fleet.report,
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

    dtype = config.model.dtype
    if arithmetic.get("dtype") != dtype:
        raise ValueError(
            f"{who} holds weights in {arithmetic.get('dtype')}, the run has model.dtype={dtype}; "
            f"restart it with --dtype {dtype}, or set model.dtype to the replica's"
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
