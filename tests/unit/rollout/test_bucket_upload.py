"""Buckets as bodies of requests, over a real socket: whole ones, too long ones, torn ones, and ones
that nobody asked for.
"""

import asyncio
import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch

from megadiff.rollout.client.client import ReplicaClient, ReplicaError
from megadiff.rollout.limits import GROUP_BROKE, Limits
from megadiff.rollout.server import replica as replica_module
from megadiff.sync.bucket import CHUNK_BYTES, bucket_manifest, encode_bucket
from megadiff.sync.transports import shared_memory
from megadiff.sync.transports.group import BROKE
from megadiff.sync.transports.receive import Receiver
from tests.unit.rollout.served import serving
from tests.waiting import wait_for

LIMIT = 12 << 20
BUCKET = [
    ("transformer.a", torch.randn(2 << 20)),
    ("transformer.b", torch.randn(1001, 3).t()),
]  # over 8 MiB
LONG = [("transformer.c", torch.zeros(LIMIT // 4))]
MANIFEST = bucket_manifest([*BUCKET, *LONG])


@pytest.fixture
def memory(monkeypatch, tmp_path) -> Path:
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path)
    return tmp_path


@pytest.fixture
def served(memory, monkeypatch):
    """(client, what the worker holds) of a replica whose worker is in this process."""
    held, receiver = {}, Receiver(torch.device("cpu"), worker=0)

    async def call(engine, method, *arguments):
        if method == "load_bucket":
            with receiver.tensors(arguments[0]) as pairs:
                held.update({name: tensor.clone() for name, tensor in pairs})

    monkeypatch.setattr(replica_module, "call_worker", call)
    limits = Limits(bucket_bytes=LIMIT)
    with serving(MANIFEST, memory, limits=limits) as url:
        client = ReplicaClient(url, "r", timeout_s=60)
        yield client, held
        client.close()


def test_a_bucket_arrives_as_it_was_sent_and_no_other(served, memory):
    client, held = served
    body = encode_bucket(BUCKET)
    with pytest.raises(ReplicaError, match="no weight push is open") as error:
        client.weights_bucket(body)
    assert error.value.status == 409
    client.weights_begin(1, MANIFEST)
    with pytest.raises(
        ReplicaError, match=f"the bucket exceeds {LIMIT} bytes; send smaller buckets"
    ) as error:
        client.weights_bucket(encode_bucket(LONG))
    assert error.value.status == 413
    _send_half(client, bytes(body))
    assert not held and not list(memory.iterdir())
    client.weights_bucket(body)
    assert held.keys() == dict(BUCKET).keys()
    assert all(torch.equal(held[name], tensor) for name, tensor in BUCKET)
    assert not list(memory.iterdir())


OF_TWO = "rank 0: RuntimeError: {}; rank 1: {}\nrank 0 traceback:\n… {}\n"


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (f"{BROKE}: late", GROUP_BROKE),
        (OF_TWO.format(BROKE, f"RuntimeError: {BROKE}", BROKE), GROUP_BROKE),
        (OF_TWO.format(BROKE, "OutOfMemoryError: 3 GiB", BROKE), 500),
        ("out of memory", 500),
    ],
)
def test_who_waited_in_vain_for_others_says_so(served, monkeypatch, text, status):
    """All workers that failed, or it is the replica's own fault."""
    client, _ = served

    async def call(engine, method, *arguments):
        raise RuntimeError(f"worker call {method} failed: {text}")

    with monkeypatch.context() as context:
        context.setattr(replica_module, "call_worker", call)
        with pytest.raises(ReplicaError) as error:
            client.weights_begin(1, MANIFEST)
        assert error.value.status == status
    client.weights_begin(2, MANIFEST)
    monkeypatch.setattr(replica_module, "call_worker", call)
    with pytest.raises(ReplicaError) as error:
        client.weights_bucket(encode_bucket(BUCKET))
    assert error.value.status == status


def test_a_worker_that_hangs_in_a_push_makes_no_progress(served, monkeypatch):
    client, _ = served
    client.weights_begin(1, MANIFEST)
    source = {"transport": "shm", "path": "x", "tensors": {}}
    monkeypatch.setattr(replica_module, "resolve", lambda *_, **__: ({}, source))
    silent_s: list[float] = []

    async def call(engine, method, *arguments):
        await asyncio.sleep(0.3)
        health = await asyncio.to_thread(client.health)  # as the heartbeat asks meanwhile
        silent_s.append(health["engine_silent_s"])

    monkeypatch.setattr(replica_module, "call_worker", call)
    client.weights_bucket(source)
    assert 0.3 <= silent_s[0] < 60
    assert client.health()["engine_silent_s"] == 0


def _send_half(client: ReplicaClient, body: bytes) -> None:
    """A body that is cut short while the replica reads it; returns when the replica has seen
    that.
    """
    place = urlsplit(client.url)
    with socket.create_connection((place.hostname, place.port)) as connection:
        head = f"POST /rl/weights/bucket HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body[: len(body) // 2])
        wait_for(lambda: any(shared_memory.FOLDER.iterdir()))
    wait_for(lambda: not any(shared_memory.FOLDER.iterdir()))


def test_a_client_hands_a_body_to_the_socket_in_small_pieces(served, monkeypatch):
    """httpcore copies what is left of a piece after each send: of one piece of a bucket's size that
    is most of the time.
    """
    from httpcore._backends.sync import SyncStream

    pieces, write = [], SyncStream.write
    monkeypatch.setattr(
        SyncStream,
        "write",
        lambda self, data, timeout=None: (pieces.append(len(data)), write(self, data, timeout)),
    )
    client, held = served
    client.weights_begin(1, MANIFEST)
    client.weights_bucket(encode_bucket(BUCKET))
    assert max(pieces) <= CHUNK_BYTES and len(held) == 2
