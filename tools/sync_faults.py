"""The faults that bench_sync_faults.py draws: a table of kinds and of their forms."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import safetensors.torch
import torch
from sync_injector import BEGIN, BUCKET, COMMIT, FILES, Fault, Form, Injector, Step
from torch import Tensor

from megadiff.process.bounded_http import Answer
from megadiff.sync.bucket import BucketBody, encode_bucket

CHUNK = 64  # bytes that exchange their places
BODIES = ("http", *FILES)
ALL = (*BODIES, "nccl")


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
    step.beside(lambda: step.send_to(path)(body))
    return step.send(step.body)


def _late_after_commit(step: Step) -> Answer:
    answer = step.send(step.body)
    body, content = step.kept_bucket
    step.beside(lambda: step.injector.carry(body, content, step.send_to(BUCKET)))
    return answer


def _early_commit(step: Step) -> Answer:
    """Commit this push's version before the bucket has come."""
    version = json.loads(step.injector.sent_begin(step.fault.target))["version"]
    step.beside(lambda: step.send_to(COMMIT)(json.dumps({"version": version}).encode()))
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
    kept = injector.kept_messages.get(injector.rank(fault), [])
    if not kept:
        return None
    stale = kept[int(fault.other * len(kept))]
    changed = flat.clone()
    changed[: len(stale)] = stale[: len(flat)]
    return None if torch.equal(changed, flat) else [changed]


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
        way=FORMS[kind, form],
        target=FORMS[kind, form].only or random_source.choice(targets),
        bucket=random_source.random(),
        position=random_source.random(),
        other=random_source.random(),
        bit=random_source.randrange(8),
    )
