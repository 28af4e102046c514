"""A replica that dies, is stopped or loses its connection at any stage of a push, by any transport.

The trainer names it in time and keeps nothing of the push; the others take the next one.
"""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

import psutil
import pytest
import torch

from megadiff.parallel.collectives import AgreedError
from megadiff.rollout.client.client import ReplicaClient, ReplicaError
from megadiff.sync.transports.table import OPTIONS
from megadiff.types import Prompt, RolloutRequest, Sampling
from tests.e2e.pushes import Source, buckets_left, folder_weights, sync_between, urls_of
from tests.e2e.servers import Forked, start_replicas, stop

HEARTBEAT_S = 2.0
LIMIT_S = 15.0  # of a push that fails: twice the heartbeat, and what a loaded machine takes
STAGES = {"begin": 0, "bucket": 1, "commit": 0}  # the number of the request that is hit
VICTIM = "victim"
REQUEST = RolloutRequest(
    prompt=Prompt(text="a red cat", id="ab" * 8),
    sampling=Sampling(
        height=64, width=64, num_inference_steps=2, sde_window_size=1, sde_window_range=(0, 1)
    ),
    sample_indices=(0,),
    seed=3,
    step=0,
)


@dataclass
class Hit:
    """Something that happens right before a request of a push to the victim goes out.

    act: None cuts the request's connection in its middle.
    """

    stage: str
    act: Callable[[], None] | None
    number: int = 0

    def is_due(self, path: str) -> bool:
        if path != f"/rl/weights/{self.stage}":
            return False
        self.number += 1
        return self.number == STAGES[self.stage] + 1


class HitClient(ReplicaClient):
    plan: Hit | None = None

    def _send(self, http: Any, method: str, path: str, body: Any, **bounds: Any) -> Any:
        plan = HitClient.plan
        if plan and self.name == VICTIM and plan.is_due(path):
            if plan.act is None:
                self._cut(path)
            else:
                plan.act()
        return super()._send(http, method, path, body, **bounds)

    def _cut(self, path: str) -> NoReturn:
        place = urlsplit(self.url)
        with socket.create_connection((place.hostname, place.port), timeout=5) as connection:
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: 1000\r\n\r\n{{".encode())
        raise ReplicaError(self.name, None, f"POST {self.url}{path} failed: the connection was cut")


def tree(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def signal_tree(pid: int, number: signal.Signals) -> None:
    for process in tree(pid):
        process.send_signal(number)


def start_victim(folder: Path, model: Path, weights: Path) -> tuple[Forked, str]:
    command = ["-m", "megadiff.cli.serve", str(model), "--dtype", "float32", "--device", "cpu"]
    (server,) = start_replicas(1, folder=folder, command=[*command, "--weights", str(weights)])
    return server, json.loads((folder / "registry" / "replica_0.json").read_text())["url"]


@pytest.fixture(scope="module")
def source(tiny_model: Path) -> Source:
    return Source(folder_weights(tiny_model, ("transformer",)))


@pytest.fixture(scope="module")
def weights(registry: Path) -> Path:
    return registry.parent / "weights"


@pytest.fixture(scope="module")
def sync_to(source: Source, tiny_model: Path, weights: Path) -> Callable[..., Any]:
    return lambda transport, urls: sync_between(
        source,
        urls,
        transport,
        model=tiny_model,
        folder=weights,
        bucket_bytes=1 << 18,
        heartbeat_s=HEARTBEAT_S,
        client=HitClient,
    )


@pytest.fixture(scope="module")
def survivors(registry: Path) -> dict[str, str]:
    return urls_of(registry)


@pytest.fixture(scope="module")
def victim(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, weights: Path
) -> Iterator[tuple[Forked, str]]:
    server, url = start_victim(tmp_path_factory.mktemp("victim"), tiny_model, weights)
    yield server, url
    signal_tree(server.pid, signal.SIGCONT)
    stop([server])


def own_threads() -> list[str]:
    names = ("weights", "sync")
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(names)]


def listening() -> set[int]:
    connections = psutil.Process().net_connections("tcp")
    return {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}


def assert_nothing_left(ports: set[int]) -> None:
    """Wait until no thread, port or file of a push is there; transfers end by their timeout."""
    deadline = time.monotonic() + LIMIT_S
    while own_threads() or listening() - ports or buckets_left():
        left = [*own_threads(), *(listening() - ports), *buckets_left()]
        assert time.monotonic() < deadline, f"a push left {left}"
        time.sleep(0.05)


def fails_and_heals(
    sync_to: Callable[..., Any],
    transport: str,
    urls: dict[str, str],
    survivors: dict[str, str],
    source: Source,
    *,
    stage: str,
    act: Callable[[], None] | None,
) -> None:
    """A push that is hit at a stage, then one to the survivors alone."""
    ports = listening()
    HitClient.plan = Hit(stage, act)
    source.factor = 1.0 + 1 / 32
    try:
        with sync_to(transport, urls) as (sync, _):
            start_s = time.monotonic()
            with pytest.raises(AgreedError, match=VICTIM):
                sync.push(11)
            assert time.monotonic() - start_s < LIMIT_S
    finally:
        HitClient.plan = None
    assert_nothing_left(ports)

    source.factor = 1.0 + 1 / 64
    with sync_to(transport, survivors) as (sync, fleet):
        sync.push(12)
        asked = replace(REQUEST, policy_version=12)
        groups = [client.generate(asked) for client in fleet.replicas]
        assert torch.equal(groups[0].latents_GSLC, groups[1].latents_GSLC)
    assert_nothing_left(ports)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("transport", OPTIONS)
def test_a_replica_that_is_stopped(sync_to, survivors, victim, source, transport, stage):
    """SIGSTOP. When it wakes up it serves nothing of the push, and takes the next one."""
    server, url = victim
    urls = survivors | {VICTIM: url}
    fails_and_heals(
        sync_to,
        transport,
        urls,
        survivors,
        source,
        stage=stage,
        act=partial(signal_tree, server.pid, signal.SIGSTOP),
    )
    signal_tree(server.pid, signal.SIGCONT)
    asked = replace(REQUEST, policy_version=12)
    with pytest.raises(ReplicaError) as refusal:
        ReplicaClient(url, VICTIM, timeout_s=60).generate(asked)
    assert refusal.value.status == 409

    with sync_to(transport, urls) as (sync, fleet):
        sync.push(13)
        assert {client.generate(REQUEST).policy_version for client in fleet.replicas} == {13}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("transport", OPTIONS)
def test_a_connection_that_drops(sync_to, survivors, victim, source, transport, stage):
    _, url = victim
    urls = survivors | {VICTIM: url}
    fails_and_heals(sync_to, transport, urls, survivors, source, stage=stage, act=None)
    with sync_to(transport, urls) as (sync, fleet):
        sync.push(13)
        assert {client.generate(REQUEST).policy_version for client in fleet.replicas} == {13}


@pytest.mark.parametrize(
    ("transport", "stage"),
    [("http", "bucket"), ("shm", "bucket"), ("disk", "commit"), ("nccl", "begin")]
    + [("nccl", "bucket"), ("nccl", "commit")],
)
def test_a_replica_that_is_killed(
    sync_to, survivors, source, tiny_model, weights, tmp_path, transport, stage
):
    server, url = start_victim(tmp_path, tiny_model, weights)
    fails_and_heals(
        sync_to,
        transport,
        survivors | {VICTIM: url},
        survivors,
        source,
        stage=stage,
        act=partial(signal_tree, server.pid, signal.SIGKILL),
    )
    server.wait(10)
