"""Transport `nccl`: trainer rank 0 and all replica workers form a process group of their own.

Between GPUs a bucket is one broadcast by NCCL, on CPU a message by gloo to each worker. The group
stands beside the default group, and is kept from push to push. Transfers run while the HTTP
requests of their bucket are open: a replica that refuses or dies answers there. After any error the
next push builds a new group.

Where one replica fails, a broadcast fails for all, and so does joining. A healthy one says after
the group's timeout that it waited in vain, and one that is stopped is lost by its heartbeat. So
answers are waited for until one tells of a fault of its own. Where none does, to blame is who has
not answered, or else all who waited in vain.

The network must be private. torch's store knows neither a password nor TLS, and NCCL encrypts
nothing: a key of ours in the store would be read by whoever can read the weights. Behind TLS there
is transport `http`.
"""

from __future__ import annotations

import logging
import socket
import threading
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, as_completed, wait
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megadiff.process.network import address_family
from megadiff.sync.bucket import Bucket, bucket_manifest, flat_bytes, write_flat
from megadiff.sync.transports.base import (
    GroupBrokeError,
    PushTarget,
    SyncError,
    Transport,
)
from megadiff.sync.transports.group_join import join, new_group, own_address
from megadiff.sync.transports.transfers import (
    TIMEOUT_S,
    abandon,
    in_background,
    receive,
    send,
)
from megadiff.tensors.manifest import Manifest
from megadiff.types import LoraSpec

logger = logging.getLogger(__name__)
# In the error of a worker that waited in vain: such errors reach the server as texts.
BROKE = "the trainer's group broke"


class GroupTransport(Transport):
    """Send from rank 0 to the workers of all targets, in one group.

    device: where buckets are gathered. num_workers: of each target. heartbeat_s: after which the
    run loses a replica that hangs.
    """

    name = "nccl"

    def __init__(
        self,
        targets: Sequence[PushTarget],
        *,
        device: torch.device,
        num_workers: Sequence[int],
        heartbeat_s: float,
    ) -> None:
        super().__init__(targets)
        self.device = device

        # of one bucket, on both sides: who waits for another must not be taken for one that hangs
        self.timeout_s = min(TIMEOUT_S, heartbeat_s / 2)
        # of the wait for a failure's cause: a heartbeat notices a silence up to a quarter late, and
        # asks again before it says so
        self.patience_s = 1.25 * heartbeat_s + 15

        self.first_ranks: dict[str, int] = {}
        self.world_size = 1  # rank 0 is the trainer
        self._names: list[str] = []  # of the other ranks, in order
        for target, count in zip(targets, num_workers, strict=True):
            self.first_ranks[target.name] = self.world_size
            self.world_size += count
            self._names += [target.name] * count

        self._group: dist.ProcessGroup | None = None
        self._given_up = threading.Event()  # those that joined wait for no others
        self._description: dict[str, Any] = {}
        self._transfers: list[Future[None]] = []
        self._num_sent = 0  # buckets by this group
        self._flat = torch.empty(0, dtype=torch.uint8, device=device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def begin(self, version: int, manifest: Manifest, lora: LoraSpec | None) -> None:
        building = [] if self._group else [self._build()]
        requests = self.start_begin(version, manifest, lora)
        # Both at once: workers join while they answer, and one that refuses ends the wait.
        pending: list[Future[Any]] = [*requests, *building]
        wait(pending, return_when=FIRST_EXCEPTION)
        for future in building:
            if future.done() and not future.exception():
                self._group = future.result()  # also where a request failed: _drop() ends it
        self._raise_first(requests, building)

    def send(self, bucket: Bucket) -> None:
        assert self._group is not None, "begin() builds the group"
        manifest = bucket_manifest(bucket)
        group_id = self._description["group"]
        source = {"transport": self.name, "group": group_id, "tensors": manifest}

        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            flat = self._laid_out(bucket, flat_bytes(manifest))
            requests = self.start(lambda target: target.weights_bucket(source))
            self._transfers = send(
                self._group,
                flat,
                number=self._num_sent,
                world_size=self.world_size,
                timeout_s=self.timeout_s,
            )
        self._num_sent += 1

        wait([*requests, *self._transfers], return_when=FIRST_EXCEPTION)
        self._raise_first(requests, self._transfers)

    def end(self, error: BaseException | None) -> None:
        # Give the memory back: training needs it between pushes.
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
            abandon(self._group, self._transfers)
        self._group = None

    def _build(self) -> Future[dist.ProcessGroup]:
        """Open a store and build a group on it, in the background, until every worker joined."""
        address = own_address([target.url for target in self.targets])
        logger.info("weights go out unencrypted from %s: its network must be private", address)
        # The system chooses a free port, and the store takes over this very socket.
        listener = socket.create_server((address, 0), family=address_family(address))
        self._description = {
            "group": uuid.uuid4().hex,
            "address": address,
            "port": listener.getsockname()[1],
            "world_size": self.world_size,
            "timeout_s": float(self.timeout_s),
        }
        self._num_sent = 0

        # A new one: the group before may have been given up, and its thread still looks.
        self._given_up = threading.Event()
        build = partial(new_group, listener=listener, given_up=self._given_up)
        return in_background(partial(build, self._description, 0, self.device))

    def description(self, target: PushTarget) -> dict[str, Any]:
        rank = self.first_ranks[target.name]
        return super().description(target) | self._description | {"rank": rank}

    def _laid_out(self, bucket: Bucket, num_bytes: int) -> Tensor:
        """Copy the bucket into this transport's own memory, which is kept for the next one."""
        if self._flat.numel() < num_bytes:
            self._flat = self._flat.new_empty(num_bytes)
        if self._stream:
            # The default stream gathered the bucket.
            self._stream.wait_stream(torch.cuda.default_stream(self.device))
        write_flat(bucket, self._flat)
        return self._flat[:num_bytes]

    def _raise_first(self, requests: Sequence[Future[None]], others: Sequence[Future[Any]]) -> None:
        """Raise the failure that is to blame; none where all is well.

        requests: of the targets in order. others: of the group, or of its ranks in order.
        """
        broken = [future for future in others if future.done() and future.exception()]
        if not broken and not any(future.done() and future.exception() for future in requests):
            return
        self._given_up.set()  # those that joined fail now
        if error := self._own_failure(requests):
            raise error

        silent = [future for future in requests if not future.done()]
        deprived = [future for future in requests if future.done() and future.exception()]
        causes = [future.exception() for future in (*broken, *deprived)]
        self._lose(requests, silent or deprived, reason=str(causes[0]))
        raise SyncError(
            f"the group of the trainer and {self._suspects(requests, others)} broke; see the "
            f"replicas' logs: {causes[0]}. A bucket may take {self.timeout_s:g} s, half of "
            f"rollout.heartbeat_s and at most {TIMEOUT_S:g}: on a slow network lower "
            "sync.bucket_mib, or set sync.transport=http"
        ) from causes[0]

    def _own_failure(self, requests: Sequence[Future[None]]) -> BaseException | None:
        """Wait for the request that fails by its replica's own fault; None where none does."""
        with suppress(TimeoutError):
            for future in as_completed(requests, timeout=self.patience_s):
                error = future.exception()
                if error and not isinstance(error, GroupBrokeError):
                    return error
        return None

    def _lose(
        self, requests: Sequence[Future[None]], failed: Sequence[Future[None]], *, reason: str
    ) -> None:
        """Let the run go on without the targets of these requests, where all of them have served.

        A newcomer among them may be what the others cannot live with: that is for the run to find.
        """
        pairs = zip(self.targets, requests, strict=True)
        lost = [target for target, future in pairs if future in failed]
        if all(target.has_served for target in lost):
            for target in lost:
                target.lose(reason)

    def _suspects(self, requests: Sequence[Future[None]], others: Sequence[Future[Any]]) -> str:
        """Name the targets whose own transfers broke, else those without an answer, else all."""
        names: list[str] = []
        if len(others) == len(self._names):
            names = [
                name
                for name, future in zip(self._names, others, strict=True)
                if future.done() and future.exception()
            ]
        if not names:
            pairs = zip(self.targets, requests, strict=True)
            names = [target.name for target, future in pairs if not future.done()]
        return ", ".join(dict.fromkeys(names or self._names))


class Member:
    """Take part in the trainer's group as a replica's worker.

    worker: its number among those of its replica.
    """

    def __init__(self, device: torch.device, *, worker: int) -> None:
        self.device = device
        self.worker = worker
        self._id = ""
        self._group: dist.ProcessGroup | None = None
        self._timeout_s = TIMEOUT_S
        self._num_received = 0  # buckets by this group

    def join(self, transport: Mapping[str, Any]) -> None:
        """Wait until every member has joined; return at once when in that group already.

        Raises ValueError for what describes no group, RuntimeError for a trainer that is silent.
        """
        keys = {
            "group": str,
            "address": str,
            "port": int,
            "rank": int,
            "world_size": int,
            "timeout_s": float,
        }
        for key, kind in keys.items():
            value = transport.get(key)
            # Not isinstance: JSON's true would pass for a number.
            if type(value) is not kind:
                raise ValueError(
                    f"transport nccl needs {key!r} of type {kind.__name__}, got {value!r:.100}"
                )

        # A trainer's word must not hold this replica for longer than its own limit.
        if not 0 < transport["timeout_s"] <= TIMEOUT_S:
            raise ValueError(
                f"timeout_s={transport['timeout_s']} of transport nccl must be above 0 and at most "
                f"{TIMEOUT_S:g}"
            )

        if transport["group"] == self._id:
            return

        self._drop()
        try:
            self._group = join(transport, transport["rank"] + self.worker, self.device)
        except (RuntimeError, TimeoutError) as error:
            raise RuntimeError(f"{BROKE} before all had joined: {error}") from error
        self._id = transport["group"]
        self._timeout_s = transport["timeout_s"]
        self._num_received = 0

    def receive(self, source: Mapping[str, Any], manifest: Manifest) -> Tensor:
        """Return the next bucket as a flat tensor.

        Raises RuntimeError when it does not come whole within the group's timeout_s.
        """
        if self._group is None or source.get("group") != self._id:
            raise ValueError(
                f"this replica is not in group {source.get('group')!r:.40}; begin the push again"
            )

        flat = torch.empty(flat_bytes(manifest), dtype=torch.uint8, device=self.device)
        transfer = receive(self._group, flat, number=self._num_received, timeout_s=self._timeout_s)
        self._num_received += 1

        error = transfer.exception()
        if error:
            self._drop(transfer)
            raise RuntimeError(
                f"a bucket of {len(flat)} bytes did not come whole from the trainer, {BROKE}: "
                f"{error}"
            )

        return flat

    def _drop(self, *transfers: Future[None]) -> None:
        if self._group is not None:
            abandon(self._group, transfers)
        self._group = None
        self._id = ""
