"""Transport `nccl`: trainer rank 0 and all replica workers form a process group of their own.

Between GPUs a bucket is one broadcast by NCCL, on CPU a message by gloo to each worker. The group is built from a store
that rank 0 opens, beside the default group, and kept from push to push. Transfers run while the HTTP requests of their
bucket are open: a replica that refuses or dies answers there, so that nothing waits for it. After any error the next push
builds a new group. Tested with torch 2.11 (CUDA) and 2.13 (CPU).
"""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from megadiff.sync.bucket import Bucket, bucket_manifest, flat_bytes, write_flat
from megadiff.sync.transports.base import POLL_S, SyncError, Transport, WeightTarget, first_done
from megadiff.tensors.manifest import Manifest
from megadiff.types import LoraSpec

JOIN_S = 360.0  # for all workers to join: a replica first finishes images for others, at most 300 s
JOIN_POLL_S = 0.02
TIMEOUT_S = 30.0  # of building the group of those that joined, and of one bucket's broadcast
EVERYONE = "everyone"  # the store's key that tells of all
BLAME_S = 5.0  # after a broadcast broke: for the request that says why


class GroupTransport(Transport):
    """device: where buckets are gathered. num_workers: of each target."""

    name = "nccl"

    def __init__(
        self, targets: Sequence[WeightTarget], *, device: torch.device, num_workers: Sequence[int]
    ) -> None:
        super().__init__(targets)
        self.device = device
        self.first_ranks = {
            target.name: 1 + sum(num_workers[:place]) for place, target in enumerate(targets)
        }
        self.world_size = 1 + sum(num_workers)
        self._id = ""
        self._group: dist.ProcessGroup | None = None
        self._given_up = threading.Event()  # those that joined wait for no others
        self._description: dict[str, Any] = {}
        self._transfers: list[Future[None]] = []
        self._flat = torch.empty(0, dtype=torch.uint8, device=device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def begin(self, version: int, manifest: Manifest, lora: LoraSpec | None) -> None:
        building = [] if self._group else [self._build()]
        requests = self.start(
            lambda target: self._begin(target, version, manifest, lora, self._told(target))
        )
        if not first_done([*requests, *building]) and building:
            self._group = building[0].result()
        self._raise_first(requests, building)

    def send(self, bucket: Bucket) -> None:
        manifest = bucket_manifest(bucket)
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            flat = self._laid_out(bucket, flat_bytes(manifest))
            source = {"transport": "nccl", "group": self._id, "tensors": manifest}
            requests = self.start(lambda target: target.weights_bucket(source))
            self._transfers = _send(self._group, flat, world_size=self.world_size)
        first_done([*requests, *self._transfers])
        self._raise_first(requests, self._transfers)

    def end(self, error: BaseException | None) -> None:
        self._flat = self._flat.new_empty(0)
        if error is not None:
            self._drop()
        self._transfers = []

    def close(self) -> None:
        self._drop()
        super().close()

    def _drop(self) -> None:
        self._given_up.set()
        if self._group is not None:
            _abandon(self._group, self._transfers)
        self._group, self._id = None, ""

    def _build(self) -> Future[dist.ProcessGroup]:
        """Opens a store and builds a new group on it, in the background: it is done when every worker has joined."""
        address = _own_address(self.targets)
        listener = socket.create_server((address, 0), family=_family(address))
        port = listener.getsockname()[1]
        self._id = uuid.uuid4().hex
        self._description = {
            "group": self._id,
            "address": address,
            "port": port,
            "world_size": self.world_size,
        }
        given_up = self._given_up = threading.Event()
        return _in_background(
            lambda: _new_group(
                self._description, 0, self.device, listener=listener, given_up=given_up
            )
        )

    def _told(self, target: WeightTarget) -> dict[str, Any]:
        return {"name": self.name, **self._description, "rank": self.first_ranks[target.name]}

    def _laid_out(self, bucket: Bucket, num_bytes: int) -> Tensor:
        """The bucket in this transport's own memory, which is kept for the next one."""
        if self._flat.numel() < num_bytes:
            self._flat = self._flat.new_empty(num_bytes)
        if self._stream:
            self._stream.wait_stream(
                torch.cuda.default_stream(self.device)
            )  # which gathered the bucket
        write_flat(bucket, self._flat)
        return self._flat[:num_bytes]

    def _raise_first(self, requests: Sequence[Future[None]], others: Sequence[Future[Any]]) -> None:
        """The first failure of those that are done; a replica's own words before what broke because of it."""
        broken = [future.exception() for future in others if future.done() and future.exception()]
        if broken:
            wait(requests, timeout=BLAME_S, return_when="FIRST_EXCEPTION")
        for future in requests:
            if future.done():
                future.result()
        if broken:
            raise SyncError(
                f"the group of trainer and replicas broke; see the replicas' logs: {broken[0]}"
            ) from broken[0]


class Member:
    """A replica worker's place in the trainer's group. worker: this worker's place among those of its replica."""

    def __init__(self, device: torch.device, *, worker: int) -> None:
        self.device, self.worker = device, worker
        self._id = ""
        self._group: dist.ProcessGroup | None = None

    def join(self, transport: Mapping[str, Any]) -> None:
        """Returns when every member has joined; at once when this one is in that group already.

        Raises ValueError for what describes no group, RuntimeError for a trainer that is silent.
        """
        keys = {"group": str, "address": str, "port": int, "rank": int, "world_size": int}
        for key, kind in keys.items():
            if type(transport.get(key)) is not kind:
                raise ValueError(
                    f"transport nccl needs {key!r} of type {kind.__name__}, got {transport.get(key)!r:.100}"
                )
        if transport["group"] == self._id:
            return
        self._drop()
        self._group = _join(transport, transport["rank"] + self.worker, self.device)
        self._id = transport["group"]

    def receive(self, source: Mapping[str, Any], manifest: Manifest) -> Tensor:
        """The next bucket as a flat tensor. Raises RuntimeError when it does not come whole within TIMEOUT_S."""
        if self._group is None or source.get("group") != self._id:
            raise ValueError(
                f"this replica is not in group {source.get('group')!r:.40}; begin the push again"
            )
        flat = torch.empty(flat_bytes(manifest), dtype=torch.uint8, device=self.device)
        transfer = _receive(self._group, flat)
        if transfer.exception():
            self._drop(transfer)
            raise RuntimeError(
                f"a bucket of {len(flat)} bytes did not come whole from the trainer: {transfer.exception()}"
            )
        return flat

    def _drop(self, *transfers: Future[None]) -> None:
        if self._group is not None:
            _abandon(self._group, transfers)
        self._group, self._id = None, ""


class _SignsOfLife:
    """When rank 0's store answered last, as the thread that asks it notes."""

    def __init__(self) -> None:
        self._heard_s = time.monotonic()

    def note(self, grace_s: float = 0.0) -> None:
        """grace_s: for what follows, beyond TIMEOUT_S."""
        self._heard_s = time.monotonic() + grace_s

    def silent_s(self) -> float:
        return time.monotonic() - self._heard_s


def _join(description: Mapping[str, Any], rank: int, device: torch.device) -> dist.ProcessGroup:
    """Return the group once all have joined.

    torch's store waits without end for an address that takes the connection and says nothing.
    Raises RuntimeError when rank 0 is silent for TIMEOUT_S.
    """
    address = description["address"]
    port = description["port"]
    life = _SignsOfLife()
    building = _in_background(lambda: _new_group(description, rank, device, life=life))
    while not building.done() and life.silent_s() < TIMEOUT_S:
        wait([building], timeout=JOIN_POLL_S)
    if building.done():
        return building.result()
    _hang_up(address, port)
    raise RuntimeError(
        f"the trainer's store at {address}:{port} did not answer for {TIMEOUT_S:.0f} s; is the "
        "trainer alive, and does a firewall let this host reach it? begin the push again"
    )


def _hang_up(address: str, port: int) -> None:
    """End this process's connections to the address, so that the thread that waits there ends."""
    for connection in psutil.Process().net_connections("tcp"):
        if connection.raddr and connection.raddr.port == port and connection.fd >= 0:
            with socket.socket(fileno=os.dup(connection.fd)) as handle, suppress(OSError):
                if handle.getpeername()[0].removeprefix("::ffff:") == address:
                    handle.shutdown(socket.SHUT_RDWR)


def _new_group(
    description: Mapping[str, Any],
    rank: int,
    device: torch.device,
    *,
    listener: socket.socket | None = None,
    given_up: threading.Event | None = None,
    life: _SignsOfLife | None = None,
) -> dist.ProcessGroup:
    """A group whose members have met. listener: rank 0's socket, on which it opens the store. given_up: it stops waiting.
    life: what the others note of rank 0.

    Raises RuntimeError: of rank 0 when the others do not come, and of those when it went or gave up.
    """
    timeout = timedelta(seconds=TIMEOUT_S)
    address, port, world_size = (
        description["address"],
        description["port"],
        description["world_size"],
    )
    serving = {"master_listen_fd": listener.detach(), "wait_for_workers": False} if listener else {}
    store = dist.TCPStore(address, port, None, listener is not None, timeout, **serving)
    if given_up is None:
        store.set(_joined(rank), "")
        _wait_for_everyone(store, life or _SignsOfLife())
    elif not _all_joined(store, world_size, given_up):
        del store  # with it the connections go, and who waits for the others is told
        raise RuntimeError(f"not all of the {world_size - 1} workers joined")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        with _environment(
            "TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"
        ):  # else a dead replica ends this process, too
            group = dist.ProcessGroupNCCL(store, rank, world_size, options)
    else:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timeout
        # gloo must be told: this host's name may stand for an address that others cannot reach.
        own_address = _source_address((address, port))
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address)]
        group = dist.ProcessGroupGloo(store, rank, world_size, options)
    if device.type == "cuda":  # NCCL connects at the first collective
        _broadcast(group, torch.zeros(1, dtype=torch.uint8, device=device)).result()
    return group


def _joined(rank: int) -> str:
    return f"joined/{rank}"


def _wait_for_everyone(store: dist.TCPStore, life: _SignsOfLife) -> None:
    """Poll rank 0's store until all have joined. Raises RuntimeError after JOIN_S."""
    deadline = time.monotonic() + JOIN_S
    while not store.check([EVERYONE]):
        life.note()
        if time.monotonic() > deadline:
            raise RuntimeError(f"not all workers joined the trainer's group within {JOIN_S:.0f} s")
        time.sleep(JOIN_POLL_S)
    life.note(grace_s=TIMEOUT_S)  # the group that is built now has a timeout of its own


def _all_joined(store: dist.TCPStore, world_size: int, given_up: threading.Event) -> bool:
    """Waits for all others, and tells them. Polls, as a wait for a key could not be given up."""
    joined, deadline = [_joined(rank) for rank in range(1, world_size)], time.monotonic() + JOIN_S
    while not store.check(joined):
        if given_up.wait(POLL_S) or time.monotonic() > deadline:
            return False
    store.set(EVERYONE, "")
    return True


def _send(group: dist.ProcessGroup, flat: Tensor, *, world_size: int) -> list[Future[None]]:
    """From rank 0 to all others. By gloo to each one alone: in its broadcast the others would wait for one that is gone."""
    if flat.device.type == "cuda":
        return [_broadcast(group, flat)]
    works = [group.send([flat], peer, 0) for peer in range(1, world_size)]
    return [
        _in_background(lambda work=work: work.wait(timedelta(seconds=TIMEOUT_S))) for work in works
    ]


def _receive(group: dist.ProcessGroup, flat: Tensor) -> Future[None]:
    """The other end of _send."""
    if flat.device.type == "cuda":
        return _broadcast(group, flat)
    work = group.recv([flat], 0, 0)
    return _in_background(lambda: work.wait(timedelta(seconds=TIMEOUT_S)))


def _broadcast(group: dist.ProcessGroup, flat: Tensor) -> Future[None]:
    """By NCCL, which only queues it: its end is waited for here."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    work, deadline = group.broadcast([flat], options), time.monotonic() + TIMEOUT_S

    def finish() -> None:
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise TimeoutError(f"a broadcast of {len(flat)} bytes took over {TIMEOUT_S:.0f} s")
            time.sleep(POLL_S)
        work.wait()

    return _in_background(finish)


def _abandon(group: dist.ProcessGroup, transfers: Sequence[Future[None]]) -> None:
    """Ends a group that may be broken, in the background. NCCL is stopped at once; gloo cannot be, and would hold the
    interpreter while it waits for a transfer that no one receives: that is waited for first."""

    def leave(held: list[dist.ProcessGroup]) -> None:
        if isinstance(held[0], dist.ProcessGroupGloo):
            wait(transfers)
        else:
            held[0].abort()
        held.clear()

    _in_background(lambda held=[group]: leave(held))


def _in_background(call: Callable[[], Any]) -> Future[Any]:
    """The call's future, from a thread that no exit waits for."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name="weights-group", daemon=True).start()
    return future


def _own_address(targets: Sequence[WeightTarget]) -> str:
    """The address of this host that all targets reach: loopback where all are on it."""
    for target in targets:
        host, port = urlsplit(target.url).hostname, urlsplit(target.url).port
        _, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if not ipaddress.ip_address(where[0]).is_loopback:
            return _source_address(where)
    return "127.0.0.1"


def _source_address(target: tuple[Any, ...]) -> str:
    """Return this host's own address on the way to another one; nothing is sent.

    Connecting a UDP socket only asks the routing table. Raises OSError where no way leads there.
    """
    with socket.socket(_family(target[0]), socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return probe.getsockname()[0]


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


@contextmanager
def _environment(name: str, value: str):
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
