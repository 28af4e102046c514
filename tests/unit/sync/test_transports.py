"""What transports do beside sending: files that are swept, sources that are refused, replicas that
are shared.
"""

import errno
import os
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch

from megadiff.config.schema import SyncConfig
from megadiff.sync.bucket import BucketBody
from megadiff.sync.transports import shared_memory
from megadiff.sync.transports.base import HttpTransport, SyncError, Transport
from megadiff.sync.transports.choose import build_transport
from megadiff.sync.transports.disk import DiskTransport
from megadiff.sync.transports.host_memory import HostMemory
from megadiff.sync.transports.receive import resolve
from megadiff.sync.transports.shared_memory import SharedMemoryTransport
from megadiff.sync.transports.table import OPTIONS, TRANSPORTS
from tests.unit.sync.push_target import BUCKETS, CPU, Target, assert_held, push


@pytest.fixture
def memory(monkeypatch, tmp_path) -> Path:
    """A folder in place of the host's shared memory."""
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path)
    return tmp_path


def test_shared_memory_holds_a_bucket_only_while_it_travels(memory):
    seen = []
    target = Target(fault=lambda number: seen.append([path.name for path in memory.iterdir()]))
    push(SharedMemoryTransport([target]))
    assert_held(target)
    assert [len(names) for names in seen] == [1, 1] and not list(memory.iterdir())
    broken = Target(fault=lambda number: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        push(SharedMemoryTransport([broken]))
    assert not list(memory.iterdir())


def test_buckets_from_a_gpu_travel_from_one_piece_of_host_memory(memory, monkeypatch, tmp_path):
    """What is copied there is what travels; the memory grows to the largest bucket and is used
    again.
    """
    held = HostMemory()
    small, large = (
        BUCKETS[1],
        [("transformer.c", torch.randn(40, 5).t()), ("transformer.d", torch.ones(3).bfloat16())],
    )
    places = []
    for bucket in (small, large, small):
        laid_out = held.laid_out(bucket)
        assert [name for name, _ in laid_out] == [name for name, _ in bucket]
        assert all(
            torch.equal(copy, tensor)
            for (_, copy), (_, tensor) in zip(laid_out, bucket, strict=True)
        )
        assert len({tensor.untyped_storage().data_ptr() for _, tensor in laid_out}) == 1
        places.append(laid_out[0][1].data_ptr())
    assert places[1] == places[2] and held.tensors(small) is small  # already on the host
    monkeypatch.setattr(HostMemory, "tensors", HostMemory.laid_out)
    folder = tmp_path / "weights"
    targets = [Target(), Target(folder=folder)]
    for transport in (
        SharedMemoryTransport(targets[:1]),
        DiskTransport(targets[1:], folder=folder),
    ):
        push(transport)
    for target in targets:
        assert_held(target)


def test_buckets_of_a_killed_trainer_are_swept(memory):
    """A process that is gone owned one; another container's, a living process's and foreign files
    stay.
    """
    gone = subprocess.Popen(["true"])
    gone.wait()
    namespace = os.stat("/proc/self/ns/pid").st_ino
    kept = [
        f"megadiff-bucket-{namespace}-{os.getpid()}-0",
        f"megadiff-bucket-1-{gone.pid}-0",
        "megadiff-bucket-x",
        "other",
    ]
    for name in (*kept, f"megadiff-bucket-{namespace}-{gone.pid}-0"):
        (memory / name).write_bytes(b"x")
    SharedMemoryTransport([])
    assert sorted(path.name for path in memory.iterdir()) == sorted(kept)


def test_shared_memory_that_is_full(memory, monkeypatch):
    def full(body, path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(BucketBody, "write", full)
    with pytest.raises(
        SyncError,
        match=r"no room for a bucket of \d+ bytes .*smaller sync.bucket_mib, or "
        r"sync.transport=http",
    ):
        push(SharedMemoryTransport([Target()]))
    assert not list(memory.iterdir())


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ([], "source is a list"),
        ({"transport": "pipe"}, "transport='pipe' of the bucket is none of"),
        ({"transport": "shm", "file": "../etc/passwd"}, "is not the name of a bucket"),
        ({"transport": "shm", "file": "/etc/passwd"}, "is not the name of a bucket"),
        ({"transport": "shm", "file": None}, "is not the name of a bucket"),
        ({"transport": "shm", "file": "megadiff-bucket-1-2-3"}, "does not exist for this replica"),
        (
            {"transport": "shm", "file": "megadiff-bucket-1-2-4"},
            "is no file of this replica's user",
        ),
        ({"transport": "shm", "file": "megadiff-bucket-1-2-5"}, "not a whole safetensors file"),
        ({"transport": "disk", "file": "../x.safetensors"}, "is not the name of a bucket"),
        (
            {"transport": "disk", "file": "version_00000001/bucket_00000.safetensors"},
            "does not exist; --weights must be",
        ),
        (
            {"transport": "nccl", "tensors": {"a": {"dtype": "int8", "shape": [1]}}},
            "a of the bucket is",
        ),
        (
            {"transport": "nccl", "tensors": {"a": {"dtype": "float32", "shape": [-1]}}},
            "a of the bucket is",
        ),
        ({"transport": "cuda_ipc"}, "tensors of the bucket is None"),
    ],
)
def test_sources_that_a_replica_refuses(memory, source, text):
    (memory / "megadiff-bucket-1-2-4").symlink_to("/etc/passwd")
    (memory / "megadiff-bucket-1-2-5").write_bytes(b"torn")
    with pytest.raises(ValueError, match=text):
        resolve(source, weights_folder=memory)


def test_a_disk_bucket_for_a_replica_without_a_folder():
    with pytest.raises(ValueError, match="started without --weights"):
        resolve(
            {"transport": "disk", "file": "version_00000001/bucket_00000.safetensors"},
            weights_folder=None,
        )


def test_the_table_names_its_senders_and_what_the_config_takes():
    assert {sender.name for sender in Transport.__subclasses__()} == TRANSPORTS.keys()
    transport = SyncConfig.__dataclass_fields__["transport"]
    assert {"auto", *OPTIONS} == set(transport.metadata["choices"])


def test_only_rank_0_sends(memory, tmp_path):
    """The others write nothing and open nothing, though they run through every push."""
    target = Target()
    here = {"host": "h", "device": "cpu", "boxes": {}}
    shared = dict(ranks=[here] * 2, device=CPU, folder=tmp_path / "weights")
    for rank, count in ((0, 1), (1, 0)):
        for name in OPTIONS:
            built = build_transport(name, [target], {"replica_0": [here]}, rank=rank, **shared)
            assert len(built.targets) == count
            if not count:
                push(built)
    assert not (tmp_path / "weights").exists()


def test_ranks_share_the_replicas_of_http(tmp_path):
    names = ["replica_0", "replica_1", "replica_2"]
    here = {"host": "h", "device": "cpu", "boxes": {}}
    shared = dict(ranks=[here] * 2, device=CPU, folder=tmp_path)
    targets = [Target() for _ in names]
    for target, name in zip(targets, names):
        target.name = name
    built = [
        build_transport("http", targets, {name: [here] for name in names}, rank=rank, **shared)
        for rank in (0, 1)
    ]
    assert built[0].targets == targets[::2] and built[1].targets == targets[1::2]


def test_http_waits_for_every_replica_before_it_raises():
    """Else a slow one would read what is already given back."""
    slow_done = threading.Event()

    class Slow(Target):
        def weights_bucket(self, bucket):
            time.sleep(0.2)
            slow_done.set()

    class Broken(Target):
        def weights_bucket(self, bucket):
            raise ConnectionError

    with pytest.raises(ConnectionError):
        HttpTransport([Broken(), Slow()]).send(BUCKETS[0])
    assert slow_done.is_set()
