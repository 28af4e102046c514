"""Build the process group of transport `nccl` on a store that trainer rank 0 opens.

Tested with torch 2.11 (CUDA) and 2.13 (CPU).
"""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import psutil
import torch
import torch.distributed as dist

from megadiff.process.network import source_address
from megadiff.sync.transports.transfers import POLL_S, broadcast, in_background

JOIN_S = 360.0  # for all workers to join: a replica first finishes images for others, at most 300 s
JOIN_POLL_S = 0.02
EVERYONE = "everyone"  # the store's key that says that all have joined


class _SignsOfLife:
    """Remember when rank 0's store answered last, as the thread that asks it notes."""

    def __init__(self) -> None:
        self._heard_s = time.monotonic()

    def note(self, grace_s: float = 0.0) -> None:
        """Note an answer. grace_s: for what follows, beyond the group's timeout_s."""
        self._heard_s = time.monotonic() + grace_s

    def silent_s(self) -> float:
        return time.monotonic() - self._heard_s


def join(description: Mapping[str, Any], rank: int, device: torch.device) -> dist.ProcessGroup:
    """Return the group once all have joined.

    torch's store waits without end for an address that takes the connection and says nothing.
    Raises RuntimeError when rank 0 is silent for the description's timeout_s.
    """
    address = description["address"]
    port = description["port"]
    timeout_s = description["timeout_s"]
    life = _SignsOfLife()
    building = in_background(lambda: new_group(description, rank, device, life=life))

    while not building.done() and life.silent_s() < timeout_s:
        wait([building], timeout=JOIN_POLL_S)
    if building.done():
        return building.result()

    _hang_up(address, port)
    raise RuntimeError(
        f"the trainer's store at {address}:{port} did not answer for {timeout_s:g} s; "
        "is the trainer alive, and does a firewall let this host reach it? begin the push again"
    )


def _hang_up(address: str, port: int) -> None:
    """End this process's connections to the address, so that the thread that waits there ends."""
    for connection in psutil.Process().net_connections("tcp"):
        if connection.raddr and connection.raddr.port == port and connection.fd >= 0:
            # A copy of the descriptor: this socket closes it, and the original is the store's.
            with socket.socket(fileno=os.dup(connection.fd)) as handle, suppress(OSError):
                # An IPv6 socket shows an IPv4 peer with this prefix.
                if handle.getpeername()[0].removeprefix("::ffff:") == address:
                    handle.shutdown(socket.SHUT_RDWR)


def new_group(
    description: Mapping[str, Any],
    rank: int,
    device: torch.device,
    *,
    listener: socket.socket | None = None,
    given_up: threading.Event | None = None,
    life: _SignsOfLife | None = None,
) -> dist.ProcessGroup:
    """Build a group whose members have met.

    listener: rank 0's socket, on which it opens the store. given_up: ends rank 0's wait for the
    others. life: what another rank notes of rank 0.
    Raises RuntimeError: on rank 0 when others do not come, on those when it went or gave up.
    """
    timeout_s = description["timeout_s"]
    timeout = timedelta(seconds=timeout_s)
    address = description["address"]
    port = description["port"]
    world_size = description["world_size"]

    serving: dict[str, Any] = {}
    if listener:
        # detach(): from here on the store owns the descriptor.
        serving = {"master_listen_fd": listener.detach(), "wait_for_workers": False}
    store = dist.TCPStore(address, port, None, listener is not None, timeout, **serving)

    if given_up is None:
        store.set(_joined(rank), "")
        _wait_for_everyone(store, life or _SignsOfLife(), timeout_s=timeout_s)
    elif not _all_joined(store, world_size, given_up):
        # Its connections go with it, which tells workers that wait for the others.
        del store
        raise RuntimeError(f"not all of the {world_size - 1} workers joined")

    if device.type == "cuda":
        torch.cuda.set_device(device)
        nccl_options = dist.ProcessGroupNCCL.Options()
        nccl_options._timeout = timeout
        # Otherwise a dead replica ends this process, too.
        with _environment("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"):
            nccl_group: Any = dist.ProcessGroupNCCL(store, rank, world_size, nccl_options)
        # NCCL connects at the first collective.
        first = torch.zeros(1, dtype=torch.uint8, device=device)
        broadcast(nccl_group, first, timeout_s=timeout_s).result()
        return nccl_group

    # torch's type stubs lack gloo's options, and that these backends do for a group
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    # gloo must be told: this host's name may stand for an address that others cannot reach.
    reachable = source_address((address, port))
    options._devices = [gloo.create_device(hostname=reachable)]
    return gloo(store, rank, world_size, options)


def _joined(rank: int) -> str:
    return f"joined/{rank}"


def _wait_for_everyone(store: dist.TCPStore, life: _SignsOfLife, *, timeout_s: float) -> None:
    """Poll rank 0's store until all have joined. Raises RuntimeError after JOIN_S."""
    deadline = time.monotonic() + JOIN_S
    while not store.check([EVERYONE]):
        life.note()
        if time.monotonic() > deadline:
            raise RuntimeError(f"not all workers joined the trainer's group within {JOIN_S:.0f} s")
        time.sleep(JOIN_POLL_S)
    life.note(grace_s=timeout_s)  # the group that is built now has a timeout of its own


def _all_joined(store: dist.TCPStore, world_size: int, given_up: threading.Event) -> bool:
    """Wait for all others and tell them. Returns False when rank 0 gave up, or after JOIN_S."""
    joined = [_joined(rank) for rank in range(1, world_size)]
    deadline = time.monotonic() + JOIN_S
    # Polls, as the store's own wait for a key could not be given up.
    while not store.check(joined):
        if given_up.wait(POLL_S) or time.monotonic() > deadline:
            return False
    store.set(EVERYONE, "")
    return True


def own_address(urls: Sequence[str]) -> str:
    """Return the address of this host that all URLs' hosts reach: loopback where all are on it."""
    for url in map(urlsplit, urls):
        *_, address = socket.getaddrinfo(url.hostname, url.port, type=socket.SOCK_STREAM)[0]
        if not ipaddress.ip_address(address[0]).is_loopback:
            return source_address(address)
    return "127.0.0.1"


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
