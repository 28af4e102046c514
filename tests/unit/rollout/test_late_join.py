"""A late joiner takes a whole version or none. (With a real replica: tests/e2e/test_sync.py.)"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
import torch

from megadiff.rollout.server.late_join import load_newest
from megadiff.rollout.spec import ReplicaSpec
from megadiff.sync.transports.disk import DiskTransport
from megadiff.sync.transports.receive import Receiver, resolve
from megadiff.tensors.fingerprint import fingerprints

CPU = torch.device("cpu")


class Joiner:
    """Holds what it reads, after fault(name, tensor) had its way with it; before: called at the
    first bucket.
    """

    spec = ReplicaSpec(model=Path(), name="late")
    workers = ({"host": "h", "device": "cpu", "boxes": {}},)

    def __init__(
        self, folder: Path, *, fault=lambda name, tensor: tensor, before=lambda: None
    ) -> None:
        self.folder, self.fault, self.before = folder, fault, before
        self.version, self.held = None, {}

    async def weights_begin(self, version, manifest, lora, transport) -> None:
        self.held = {}

    async def weights_bucket_at(self, source) -> None:
        self.before()
        _, source = resolve(source, weights_folder=self.folder)
        with Receiver(CPU, worker=0).tensors(source) as pairs:
            self.held |= {name: self.fault(name, tensor.clone()) for name, tensor in pairs}

    async def weights_commit(self, version):
        self.version = version
        return [{"fingerprints": fingerprints(self.held), "bound_modules": []}]


@pytest.fixture
def push(tmp_path):
    transport = DiskTransport([], folder=tmp_path)

    def push(version: int, value: float | None = None) -> None:
        tensors = [
            ("transformer.a", torch.full((2, 300), float(version) if value is None else value)),
            ("transformer.b", torch.ones(4)),
        ]
        transport.begin(version, {name: {} for name, _ in tensors}, None)
        for pair in tensors:
            transport.send([pair])
        transport.end(None)

    return push


def test_the_newest_version_is_taken(push, tmp_path):
    joiner = Joiner(tmp_path)
    asyncio.run(load_newest(joiner, tmp_path))
    assert joiner.version is None  # there is none yet
    for version in (1, 2):
        push(version)
    asyncio.run(load_newest(joiner, tmp_path))
    assert joiner.version == 2 and (joiner.held["transformer.a"] == 2).all()


def test_a_version_that_goes_while_it_is_read(push, tmp_path):
    push(1)
    later = iter([lambda: (push(2), push(3))])
    joiner = Joiner(tmp_path, before=lambda: next(later, lambda: None)())
    asyncio.run(load_newest(joiner, tmp_path))
    assert joiner.version == 3 and (joiner.held["transformer.a"] == 3).all()


def test_the_same_version_that_is_pushed_again_while_it_is_read(push, tmp_path):
    """As an evaluation's average and the next step's weights."""
    push(1)
    later = iter([lambda: push(1, value=7.0)])
    joiner = Joiner(tmp_path, before=lambda: next(later, lambda: None)())
    asyncio.run(load_newest(joiner, tmp_path))
    assert joiner.version == 1 and (joiner.held["transformer.a"] == 7).all()


def test_a_torn_version_is_refused(push, tmp_path):
    push(1)
    path = tmp_path / "version_00000001" / "bucket_00000.safetensors"
    body = bytearray(path.read_bytes())
    body[-5] ^= 1
    path.write_bytes(body)
    with pytest.raises(
        ValueError,
        match="version 1: 1 tensors are not as they were written: transformer.a; the folder is "
        "torn",
    ):
        asyncio.run(load_newest(Joiner(tmp_path), tmp_path))
    path.write_bytes(body[:-100])
    with pytest.raises(ValueError, match="version 1: "):
        asyncio.run(load_newest(Joiner(tmp_path), tmp_path))
    path.unlink()
    with pytest.raises(ValueError, match="version 1: "):
        asyncio.run(load_newest(Joiner(tmp_path), tmp_path))
    shutil.rmtree(path.parent)


def test_a_replica_that_holds_other_bits_is_not_announced(push, tmp_path):
    push(1)
    joiner = Joiner(tmp_path, fault=lambda name, tensor: tensor * 2)
    with pytest.raises(ValueError, match="late at version 1 holds 2 of 2 tensors with other bits"):
        asyncio.run(load_newest(joiner, tmp_path))
