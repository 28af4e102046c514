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
from urllib.parse import quote

from megadiff.config.schema import Config
from megadiff.config.validate import sleeps
from megadiff.observe.text_files import write_whole
from megadiff.parallel.collectives import read_once
from megadiff.parallel.mesh import Mesh
from megadiff.process.versions import sampling_code
from megadiff.rollout.client.client import ReplicaClient
from megadiff.rollout.client.fleet import Fleet
from megadiff.rollout.client.members import Members
from megadiff.rollout.client.processes import ReplicaProcess, environment_token
from megadiff.rollout.client.registry import RegistryWatch, wait_until_announced
from megadiff.rollout.client.report import Report, no_report
from megadiff.rollout.client.supervisor import Supervisor
from megadiff.rollout.spec import flag_of
from megadiff.train.replicas import (
    log_file,
    num_replicas,
    registry_folder,
    users_of,
)
from megadiff.types import JsonObject

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


def _token_of(processes: Sequence[ReplicaProcess]) -> str | None:
    return processes[0].token if processes else environment_token()


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
    Raises AgreedError for a replica that computes otherwise than the run says, or by other code.
    """
    rollout = config.rollout
    users = users_of(config, mesh)
    is_colocated = users.node is not None
    registry = registry_folder(folder, users.node) if is_colocated else Path(rollout.registry)

    world = mesh.cpu_group
    run = read_once(lambda: run_id(config, folder), source=0, group=world, world=world)
    code = read_once(sampling_code, source=0, group=world, world=world)
    check = partial(check_arithmetic, config=config, code=code)
    # the source's: a run may have drawn its own, which no environment holds
    read_token = partial(_token_of, processes)
    token = read_once(read_token, source=users.source, group=users.group, world=world)

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
            check(replica)
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
    supervisor = None
    if users.here:
        watch = RegistryWatch(registry, token=token, run=run)
        supervisor = _supervisor(
            config,
            mesh,
            watch,
            announced,
            processes,
            fleet=fleet,
            make_client=make_client,
            check=check,
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
    check: Callable[[JsonObject], None],
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
        check=check,
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


def check_arithmetic(replica: JsonObject, config: Config, *, code: Mapping[str, str]) -> None:
    """Raise ValueError where a replica computes otherwise than the run says, or by other code.

    That would show as a parity gap without a cause, or not at all. replica: its name, url and
    health. code: sampling_code() of rank 0.
    """
    who = f"{replica['name']} at {replica['url']}"
    told = replica["health"].get("arithmetic")
    arithmetic = told if isinstance(told, dict) else {}
    _check_code(who, arithmetic.get("code"), code, config)

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


def _check_code(who: str, told: object, code: Mapping[str, str], config: Config) -> None:
    """Raise ValueError where an installation has changed under a run, by `git pull` or setup.sh.

    Separate replicas may have libraries of their own: each passes the gate before it serves.
    """
    theirs = told if isinstance(told, dict) else {}
    for name in code if config.rollout.mode == "colocated" else ("megadiff",):
        if theirs.get(name) != code[name]:
            version = theirs.get(name, "that it does not tell")
            raise ValueError(
                f"{who} runs {name} {version!s:.80}, and the run began with {name} {code[name]}; "
                "start the replica again from the run's version, or the run from the replica's: "
                "it goes on from its checkpoint"
            )
