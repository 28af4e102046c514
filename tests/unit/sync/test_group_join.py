"""A replica's worker is not held by a silent trainer, and leaves no thread or socket behind."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
import torch
import torch.distributed as dist

from megadiff.sync.transports import group_join
from megadiff.sync.transports.group import Member

SECONDS = 1.0


@pytest.fixture
def member() -> Member:
    return Member(torch.device("cpu"), worker=0)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def description(listener: socket.socket) -> dict:
    port = listener.getsockname()[1]
    return {
        "group": "g",
        "address": "127.0.0.1",
        "port": port,
        "rank": 1,
        "world_size": 3,
        "timeout_s": SECONDS,
    }


def joins_within(member: Member, transport: dict, seconds: float, *, match: str) -> None:
    before = threading.active_count()
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=match):
        member.join(transport)
    assert time.monotonic() - start < seconds
    wait_for(lambda: threading.active_count() <= before)  # others of earlier tests may end


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def num_connections(port: int) -> int:
    connections = psutil.Process().net_connections("tcp")
    return sum(bool(each.raddr) and each.raddr.port == port for each in connections)


def test_an_address_that_takes_the_connection_and_is_silent(
    member: Member, listener: socket.socket
) -> None:
    transport = description(listener)
    joins_within(member, transport, SECONDS + 2, match="did not answer for 1 s")
    listener.close()
    wait_for(lambda: num_connections(transport["port"]) == 0)


def test_an_address_where_nobody_listens(member: Member, listener: socket.socket) -> None:
    transport = description(listener)
    listener.close()
    joins_within(member, transport, SECONDS + 2, match="did not answer for 1 s|timed out")


def test_a_trainer_whose_other_replicas_do_not_come(
    member: Member, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its store answers, so that it is waited for longer than a silent one."""
    monkeypatch.setattr(group_join, "JOIN_S", 2 * SECONDS)
    transport = description(listener)
    store = dist.TCPStore(
        "127.0.0.1",
        transport["port"],
        None,
        True,
        master_listen_fd=listener.detach(),
        wait_for_workers=False,
    )
    start = time.monotonic()
    joins_within(member, transport, 2 * SECONDS + 2, match="not all workers joined .* within 2 s")
    assert time.monotonic() - start >= 2 * SECONDS
    assert store.check(["joined/1"])
