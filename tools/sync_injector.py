"""Let a push through to replicas, and spoil one request or message of it on its way.

Requests are spoiled where the trainer's HTTP client sends them. A bucket's bytes are spoiled in the
request, in a copy of the file that the request names, or in the message of the process group.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from megadiff.process.bounded_http import Answer
from megadiff.rollout.client.client import ReplicaClient, ReplicaError
from megadiff.sync.bucket import BucketBody
from megadiff.sync.transports import group as group_transport
from megadiff.sync.transports import shared_memory, transfers
from megadiff.sync.transports.shared_memory import bucket_file

BEGIN, BUCKET, COMMIT = (f"/rl/weights/{step}" for step in ("begin", "bucket", "commit"))
FILES = ("shm", "disk")
Send = Callable[..., Answer]


@dataclass(frozen=True)
class Form:
    """A way of a kind of fault.

    where: the request that is spoiled, or "message" or "worker". only: the replica that can have
    it.
    """

    transports: tuple[str, ...]
    where: str
    spoil: Callable[[Step], Answer] = lambda step: step.send(step.body)
    message: Any = None
    only: str = ""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault of one push. It is drawn from a seed alone, so that a line of output repeats it.

    kind, form: how it is called. way: how it is done. target: the replica. bucket, position, other:
    fractions, of the push's buckets and of the bytes that are spoiled. bit: of a byte, and the
    worker it concerns.
    """

    transport: str
    kind: str
    form: str
    way: Form = field(repr=False)
    target: str
    bucket: float
    position: float
    other: float
    bit: int


class RawBody(BucketBody):
    """Bytes that are sent as a bucket's body, whatever they are."""

    def __init__(self, content: bytes) -> None:
        self._buffers = [memoryview(content)]
        self._num_bytes = len(content)


class FaultyClient(ReplicaClient):
    """A client whose pushes go through an injector. injector: None passes all on."""

    injector: Injector | None = None

    def _send(self, http: Any, method: str, path: str, body: Any, **bounds: Any) -> Answer:
        send = partial(super()._send, http, method, path, **bounds)
        if self.injector is None or path not in (BEGIN, BUCKET, COMMIT):
            return send(body)
        health = partial(super()._send, http, "GET", "/health", b"", **bounds)
        return self.injector.request(self.name, path, body, send, health)


@dataclass
class Kept:
    """What a push sent to a replica: begin and commit, and each bucket's request and bytes."""

    begin: bytes = b""
    commit: bytes = b""
    buckets: list[tuple[Any, bytes]] = field(default_factory=list)


class Injector:
    """Let requests and messages of a push pass, and spoil the one that the armed fault names.

    folder: of transport disk. fault_file: read by the workers of faulty_worker.py.
    was_injected: since arm(). num_buckets: of the last push that passed whole.
    """

    def __init__(self, folder: Path, fault_file: Path) -> None:
        self.folder = folder
        self.fault_file = fault_file
        self.others: dict[str, Send] = {}  # how a request reaches each replica
        self.kept: dict[str, Kept] = {}
        self.kept_messages: dict[int, list[Tensor]] = {}
        self.num_buckets = 1
        self.first_ranks: Mapping[str, int] = {}
        self.arm(None)

    def arm(self, fault: Fault | None, *, num_buckets: int = 1) -> None:
        """Begin a push with this fault. num_buckets: that it is expected to have."""
        self.fault = fault
        self.was_injected = False
        self._index = int(fault.bucket * num_buckets) if fault else 0
        self._last = num_buckets - 1
        self._now: dict[str, Kept] = defaultdict(Kept)
        self._numbers: dict[str, int] = defaultdict(int)
        self._messages: dict[int, list[Tensor]] = defaultdict(list)
        self._held: tuple[Any, bytes, Send] | None = None
        is_inside = fault is not None and fault.way.where == "worker"
        self.fault_file.write_text(f"{fault.form} {self._index}" if is_inside and fault else "")
        self.was_injected = is_inside

    def keep(self) -> None:
        """Keep what the push sent that passed, for what is to come late."""
        self.kept = dict(self._now)
        self.kept_messages = dict(self._messages)
        self.num_buckets = max(len(kept.buckets) for kept in self.kept.values())

    def request(self, name: str, path: str, body: Any, send: Send, health: Send) -> Answer:
        """Pass a request on, or spoil it. health: another request, whose answer is a 200."""
        self.others[name] = send if path == BUCKET else self.others.get(name, send)
        now = self._now[name]
        content = self._content(body) if path == BUCKET else b""
        if path == BEGIN:
            now.begin = body
        elif path == COMMIT:
            now.commit = body
        else:
            now.buckets.append((body, content))

        fault = self.fault
        number = self._numbers[name]
        if path == BUCKET:
            self._numbers[name] += 1
        if fault is None or fault.target != name:
            return send(body)

        form = fault.way
        step = Step(self, fault, body, content, send, health)
        if form.where == "order" and path == BUCKET:
            return self._out_of_order(step, number)
        if form.where == {BEGIN: "begin", COMMIT: "commit", BUCKET: "bucket"}[path]:
            if path != BUCKET or number == min(self._index, self._last):
                return form.spoil(step)
        if form.where == "version":
            return form.spoil(step)
        return send(body)

    def _out_of_order(self, step: Step, number: int) -> Answer:
        """Hold a bucket back until the next one has been answered."""
        if number == self._index and number < self._last:
            self._held = (step.body, step.content, step.send)
            self.was_injected = True
            return step.health()
        answer = step.send(step.body)
        if self._held and number == self._index + 1:
            body, content, send = self._held
            with suppress(ReplicaError):
                self.carry(body, content, send)
        return answer

    def _content(self, body: Any) -> bytes:
        """Return a bucket's bytes, wherever they lie; nothing for a message of the group."""
        if isinstance(body, BucketBody):
            return bytes(body)
        path = self._path(json.loads(body))
        return path.read_bytes() if path else b""

    def _path(self, source: Mapping[str, Any]) -> Path | None:
        if source["transport"] not in FILES:
            return None
        folder = shared_memory.FOLDER if source["transport"] == "shm" else self.folder
        return folder / source["file"]

    def carry(self, body: Any, content: bytes, send: Send) -> Answer:
        """Send a bucket with these bytes, as its transport carries them."""
        if isinstance(body, BucketBody):
            return send(RawBody(content))
        source = json.loads(body)
        path = self._path(source)
        if path is None:
            return send(body)
        if source["transport"] == "shm":
            with bucket_file() as copy:
                copy.write_bytes(content)
                return send(json.dumps(source | {"file": copy.name}).encode())
        # A file of a version that is written no more may be gone, with its folder.
        folders = [path.parent, *self.folder.glob("*.part")]
        folder = next(each for each in folders if each.is_dir())
        copy = folder / "bucket_99999.safetensors"
        copy.write_bytes(content)
        try:
            return send(json.dumps(source | {"file": f"{folder.name}/{copy.name}"}).encode())
        finally:
            copy.unlink(missing_ok=True)

    def message(self, group: Any, flat: Tensor, peer: int, tag: int) -> Any:
        """Send a message of the group, or spoil it."""
        number = len(self._messages[peer])
        self._messages[peer].append(flat.clone())
        fault = self.fault
        is_due = fault is not None and number == min(self._index, self._last)
        if not is_due or fault is None or peer != self.rank(fault):
            return group.send([flat], peer, tag)
        form = fault.way
        if form.message is None:
            return group.send([flat], peer, tag)
        changed = form.message(self, fault, flat.clone())
        if changed is None:
            return group.send([flat], peer, tag)
        self.was_injected = True
        works = [group.send([message], peer, tag) for message in changed]
        for work in works[1:]:
            # Waited for: its memory must not go before its transfer has ended.
            transfers.in_background(partial(work.wait, timedelta(seconds=30)))
        return works[0] if works else _NoWork()

    def sent_begin(self, name: str) -> bytes:
        """Return the body by which the push that is under way began."""
        return self._now[name].begin

    def rank(self, fault: Fault) -> int:
        """Return the rank in the group that a fault of messages concerns."""
        first = self.first_ranks[fault.target]
        later = [rank for rank in self.first_ranks.values() if rank > first]
        last = min(later) if later else first + 1 + (fault.target == "pair")
        return first + fault.bit % (last - first)


class _NoWork:
    def wait(self, timeout: timedelta) -> None: ...


@dataclass(frozen=True)
class Step:
    """A request that is to be spoiled."""

    injector: Injector
    fault: Fault
    body: Any
    content: bytes
    send: Send
    health: Send

    def send_to(self, path: str) -> Send:
        """Return what sends a body to another path of the replica."""
        http, method, _ = self.send.args
        return partial(self.send.func, http, method, path, **self.send.keywords)

    def carry(self, content: bytes) -> Answer:
        """Send the bucket with other bytes; as it is where they are the same."""
        self.injector.was_injected |= content != self.content
        return self.injector.carry(self.body, content, self.send)

    def resend(self, body: Any) -> Answer:
        """Send another body."""
        self.injector.was_injected |= body != self.body
        return self.send(body)

    def beside(self, send: Callable[[], Answer]) -> None:
        """Send something that the trainer does not wait for; nobody reads its answer."""
        self.injector.was_injected = True
        with suppress(ReplicaError):
            send()

    @property
    def kept(self) -> Kept:
        return self.injector.kept[self.fault.target]

    @property
    def kept_bucket(self) -> tuple[Any, bytes]:
        buckets = self.kept.buckets
        return buckets[int(self.fault.other * len(buckets))]

    @property
    def is_message(self) -> bool:
        return not isinstance(self.body, BucketBody) and not self.content


@contextmanager
def spoiled_messages(injector: Injector) -> Iterator[None]:
    """Let all messages of process groups go through the injector."""

    class SpoiledGroup:
        def __init__(self, group: Any) -> None:
            self.group = group

        def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
            return injector.message(self.group, tensors[0], peer, tag)

    plain = group_transport.send

    def send(group: Any, flat: Tensor, **arguments: Any) -> Any:
        return plain(SpoiledGroup(group), flat, **arguments)  # type: ignore[arg-type]

    group_transport.send = send
    try:
        yield
    finally:
        group_transport.send = plain
