"""Spoil one push to one replica, on its way: what bench_sync_faults.py draws, and its short form.

Requests are spoiled where the trainer's HTTP client sends them. A bucket's bytes are spoiled in the
request, in a copy of the file that the request names, or in the message of the process group.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from megadiff.process.bounded_http import Answer
from megadiff.rollout.client.client import ReplicaClient, ReplicaError
from megadiff.sync.bucket import BucketBody, encode_bucket
from megadiff.sync.transports import group as group_transport
from megadiff.sync.transports import shared_memory, transfers
from megadiff.sync.transports.shared_memory import bucket_file

CHUNK = 64  # bytes that exchange their places
BEGIN, BUCKET, COMMIT = (f"/rl/weights/{step}" for step in ("begin", "bucket", "commit"))
FILES = ("shm", "disk")
BODIES = ("http", *FILES)
ALL = (*BODIES, "nccl")
Send = Callable[..., Answer]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault of one push. It is drawn from a seed alone, so that a line of output repeats it.

    kind, form: a row of FORMS. target: the replica. bucket, position, other: fractions, of the
    push's buckets and of the bytes that are spoiled. bit: of a byte, and the worker it concerns.
    """

    transport: str
    kind: str
    form: str
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
        is_inside = fault is not None and FORMS[fault.kind, fault.form].where == "worker"
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

        form = FORMS[fault.kind, fault.form]
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
        if not is_due or fault is None or peer != self._rank(fault):
            return group.send([flat], peer, tag)
        form = FORMS[fault.kind, fault.form]
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

    def _rank(self, fault: Fault) -> int:
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


def _cut(fault: Fault, content: bytes) -> bytes:
    return content[: int(fault.position * len(content))]


def _flip(fault: Fault, content: bytes) -> bytes:
    changed = bytearray(content)
    if changed:
        changed[int(fault.position * len(changed))] ^= 1 << fault.bit
    return bytes(changed)


def _exchange_chunks(fault: Fault, content: bytes) -> bytes:
    count = len(content) // CHUNK
    if not count:
        return content
    first = CHUNK * int(fault.position * count)
    second = CHUNK * int(fault.other * count)
    changed = bytearray(content)
    changed[first : first + CHUNK] = content[second : second + CHUNK]
    changed[second : second + CHUNK] = content[first : first + CHUNK]
    return bytes(changed)


def _flip_header(fault: Fault, content: bytes) -> bytes:
    # safetensors: eight bytes of length, then JSON
    size = 8 + int.from_bytes(content[:8], "little")
    return _flip(fault, content[:size]) + content[size:]


def _drop_tensor(fault: Fault, content: bytes) -> bytes:
    tensors = safetensors.torch.load(content)
    names = sorted(tensors)
    del tensors[names[int(fault.position * len(names))]]
    return bytes(encode_bucket(list(tensors.items())))


def _pair_of_like(fault: Fault, shapes: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return two names of one shape, where there are."""
    names = sorted(shapes)
    first = names[int(fault.position * len(names))]
    like = [name for name in names if shapes[name] == shapes[first] and name != first]
    return (first, like[int(fault.other * len(like))]) if like else None


def _exchange_names(fault: Fault, content: bytes) -> bytes:
    tensors = safetensors.torch.load(content)
    pair = _pair_of_like(fault, {name: tensor.shape for name, tensor in tensors.items()})
    if pair is None:
        return content
    first, second = pair
    changed = tensors | {first: tensors[second], second: tensors[first]}
    return bytes(encode_bucket(list(changed.items())))


def _content_form(change: Callable[[Fault, bytes], bytes]) -> Callable[[Step], Answer]:
    return lambda step: step.carry(change(step.fault, step.content))


def _message_form(change: Callable[[Fault, bytes], bytes]) -> Any:
    def changed(_: Injector, fault: Fault, flat: Tensor) -> list[Tensor] | None:
        before = bytes(flat.numpy().tobytes())
        after = change(fault, before)
        if after == before or not after:
            return None
        return [torch.frombuffer(bytearray(after), dtype=torch.uint8)]

    return changed


def _body_form(change: Callable[[Fault, bytes], bytes]) -> Callable[[Step], Answer]:
    return lambda step: step.resend(change(step.fault, bytes(step.body)))


def _exchange_rows(fault: Fault, body: bytes) -> bytes:
    """Let two tensors of one shape exchange their places in a message's description."""
    source = json.loads(body)
    pair = _pair_of_like(fault, source["tensors"])
    if pair is None:
        return body
    renamed = {pair[0]: pair[1], pair[1]: pair[0]}
    rows = {renamed.get(name, name): row for name, row in source["tensors"].items()}
    return json.dumps(source | {"tensors": rows}).encode()


def _drop(step: Step) -> Answer:
    step.injector.was_injected = True
    return step.health()


def _double(step: Step) -> Answer:
    # The second of a message's requests would wait for a message of its own.
    if step.is_message:
        answer = step.send(step.body)
        step.beside(lambda: step.send(step.body))
        return answer
    bucket = isinstance(step.body, BucketBody) or step.content
    resend = partial(step.carry, step.content) if bucket else partial(step.send, step.body)
    answer = resend()
    step.beside(resend)
    return answer


def _late_bucket(step: Step, *, is_after: bool) -> Answer:
    """Let a bucket of an earlier push arrive beside this one's."""
    body, content = step.kept_bucket
    answer = step.send(step.body) if is_after else None
    step.beside(lambda: step.injector.carry(body, content, step.injector.others[step.fault.target]))
    return answer or step.send(step.body)


def _late_request(step: Step, body: bytes, path: str) -> Answer:
    """Let an earlier push's begin or commit arrive before this request."""
    send = step.send
    other = partial(send.func, *send.args[:2], path, *send.args[3:], **send.keywords)
    step.beside(lambda: other(body))
    return step.send(step.body)


def _late_after_commit(step: Step) -> Answer:
    answer = step.send(step.body)
    send = step.send
    bucket = partial(send.func, *send.args[:2], BUCKET, *send.args[3:], **send.keywords)
    body, content = step.kept_bucket
    step.beside(lambda: step.injector.carry(body, content, bucket))
    return answer


def _early_commit(step: Step) -> Answer:
    """Commit this push's version before the bucket has come."""
    send = step.send
    version = json.loads(step.injector._now[step.fault.target].begin)["version"]
    commit = partial(send.func, *send.args[:2], COMMIT, *send.args[3:], **send.keywords)
    step.beside(lambda: commit(json.dumps({"version": version}).encode()))
    return step.send(step.body)


def _other_version(*paths: str) -> Callable[[Step], Answer]:
    def spoil(step: Step) -> Answer:
        if isinstance(step.body, BucketBody) or step.send.args[2] not in paths:
            return step.send(step.body)
        value = json.loads(step.body)
        value["version"] += 1 + step.fault.bit
        return step.resend(json.dumps(value).encode())

    return spoil


def _elsewhere(step: Step) -> Answer:
    """Send the bucket to another replica in its place."""
    names = sorted(step.injector.others.keys() - {step.fault.target})
    other = names[int(step.fault.other * len(names))]
    step.beside(lambda: step.injector.carry(step.body, step.content, step.injector.others[other]))
    return step.health()


def _exchange_digests(step: Step) -> Answer:
    value = json.loads(step.body)
    value["digests"].reverse()
    return step.resend(json.dumps(value).encode())


def _stale_message(injector: Injector, fault: Fault, flat: Tensor) -> list[Tensor] | None:
    """Return what the rank got in the push before, cut or filled to this bucket's size."""
    kept = injector.kept_messages.get(injector._rank(fault), [])
    if not kept:
        return None
    stale = kept[int(fault.other * len(kept))]
    changed = flat.clone()
    changed[: len(stale)] = stale[: len(flat)]
    return None if torch.equal(changed, flat) else [changed]


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


FORMS: dict[tuple[str, str], Form] = {
    ("dropped", "bucket"): Form(BODIES, "bucket", _drop),
    ("dropped", "tensor"): Form(BODIES, "bucket", _content_form(_drop_tensor)),
    ("dropped", "begin"): Form(ALL, "begin", _drop),
    ("dropped", "commit"): Form(ALL, "commit", _drop),
    ("dropped", "request"): Form(("nccl",), "bucket", _drop),
    ("dropped", "message"): Form(("nccl",), "message", message=lambda *_: []),
    ("doubled", "bucket"): Form(ALL, "bucket", _double),
    ("doubled", "begin"): Form(ALL, "begin", _double),
    ("doubled", "commit"): Form(ALL, "commit", _double),
    ("doubled", "message"): Form(
        ("nccl",), "message", message=lambda injector, fault, flat: [flat, flat.clone()]
    ),
    ("swapped", "chunks"): Form(BODIES, "bucket", _content_form(_exchange_chunks)),
    ("swapped", "names"): Form(BODIES, "bucket", _content_form(_exchange_names)),
    ("swapped", "order"): Form(BODIES, "order"),
    ("swapped", "rows"): Form(("nccl",), "bucket", _body_form(_exchange_rows)),
    ("swapped", "message"): Form(("nccl",), "message", message=_message_form(_exchange_chunks)),
    ("truncated", "bucket"): Form(BODIES, "bucket", _content_form(_cut)),
    ("truncated", "begin"): Form(ALL, "begin", _body_form(_cut)),
    ("truncated", "commit"): Form(ALL, "commit", _body_form(_cut)),
    ("truncated", "request"): Form((*FILES, "nccl"), "bucket", _body_form(_cut)),
    ("truncated", "message"): Form(("nccl",), "message", message=_message_form(_cut)),
    ("flipped", "bucket"): Form(BODIES, "bucket", _content_form(_flip)),
    ("flipped", "header"): Form(BODIES, "bucket", _content_form(_flip_header)),
    ("flipped", "begin"): Form(ALL, "begin", _body_form(_flip)),
    ("flipped", "commit"): Form(ALL, "commit", _body_form(_flip)),
    ("flipped", "request"): Form((*FILES, "nccl"), "bucket", _body_form(_flip)),
    ("flipped", "message"): Form(("nccl",), "message", message=_message_form(_flip)),
    ("late", "before"): Form(ALL, "bucket", partial(_late_bucket, is_after=False)),
    ("late", "after"): Form(ALL, "bucket", partial(_late_bucket, is_after=True)),
    ("late", "committed"): Form(ALL, "commit", _late_after_commit),
    ("late", "begin"): Form(
        ALL, "bucket", lambda step: _late_request(step, step.kept.begin, BEGIN)
    ),
    ("late", "commit"): Form(
        ALL, "commit", lambda step: _late_request(step, step.kept.commit, COMMIT)
    ),
    ("late", "message"): Form(("nccl",), "message", message=_stale_message),
    ("version", "begin"): Form(ALL, "version", _other_version(BEGIN)),
    ("version", "commit"): Form(ALL, "version", _other_version(COMMIT)),
    ("version", "both"): Form(ALL, "version", _other_version(BEGIN, COMMIT)),
    ("version", "early"): Form(ALL, "bucket", _early_commit),
    ("worker", "elsewhere"): Form(BODIES, "bucket", _elsewhere),
    ("worker", "digests"): Form(ALL, "commit", _exchange_digests, only="pair"),
    ("worker", "parts"): Form(ALL, "worker", only="pair"),
    ("worker", "answers"): Form(ALL, "worker", only="pair"),
    ("worker", "idle"): Form(ALL, "worker", only="pair"),
}
KINDS = tuple(dict.fromkeys(kind for kind, _ in FORMS))


def draw(random_source: random.Random, transport: str, kind: str, targets: list[str]) -> Fault:
    """Draw a fault of a kind: its forms are equally likely."""
    forms = [
        name
        for (of_kind, name), form in FORMS.items()
        if of_kind == kind and transport in form.transports and form.only in ("", *targets)
    ]
    form = random_source.choice(forms)
    return Fault(
        transport=transport,
        kind=kind,
        form=form,
        target=FORMS[kind, form].only or random_source.choice(targets),
        bucket=random_source.random(),
        position=random_source.random(),
        other=random_source.random(),
        bit=random_source.randrange(8),
    )


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
