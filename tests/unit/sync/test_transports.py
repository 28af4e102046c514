"""What transports do beside sending: files that are swept, folders that stay whole, groups that
break.
"""

import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megadiff.config.schema import SyncConfig
from megadiff.sync.bucket import BucketBody, bucket_manifest
from megadiff.sync.transports import disk, group, shared_memory, transfers
from megadiff.sync.transports.base import GroupBrokeError, HttpTransport, SyncError, Transport
from megadiff.sync.transports.choose import build_transport
from megadiff.sync.transports.disk import DiskTransport
from megadiff.sync.transports.group import GroupTransport, Member
from megadiff.sync.transports.host_memory import HostMemory
from megadiff.sync.transports.receive import Receiver, resolve
from megadiff.sync.transports.shared_memory import SharedMemoryTransport
from megadiff.sync.transports.table import OPTIONS, TRANSPORTS
from megadiff.tensors.fingerprint import fingerprints
from megadiff.types import LoraSpec

CPU = torch.device("cpu")
BUCKETS = [[("transformer.a", torch.arange(6.0).view(2, 3))], [("transformer.b", torch.ones(4))]]
MANIFEST = {
    "transformer.a": {"dtype": "float32", "shape": [2, 3]},
    "transformer.b": {"dtype": "float32", "shape": [4]},
}
LORA = LoraSpec(rank=1, alpha=1.0, modules=("m",))
LORA_BUCKET = [
    ("transformer.m.lora_A.weight", torch.ones(1, 2)),
    ("transformer.m.lora_B.weight", torch.zeros(2, 1)),
]
LORA_MANIFEST = {
    name: {"dtype": "float32", "shape": list(tensor.shape)} for name, tensor in LORA_BUCKET
}


class Target:
    """A replica that reads each bucket as a worker does, in this process; fault(bucket number) may
    raise instead.
    """

    url = "http://127.0.0.1:1"

    def __init__(self, *, folder: Path | None = None, fault=lambda number: None) -> None:
        self.name, self.folder, self.fault = "replica_0", folder, fault
        self.receiver, self.held, self.number = Receiver(CPU, worker=0), {}, 0
        self.has_served = True
        self.reasons = []  # for which it was lost

    def weights_begin(self, version, manifest, *, lora, transport):
        self.held = {}
        self.receiver.begin(transport)

    def weights_bucket(self, bucket):
        self.fault(self.number)
        self.number += 1
        manifest, source = resolve(bucket, weights_folder=self.folder)
        with self.receiver.tensors(source) as pairs:
            held = {name: tensor.clone() for name, tensor in pairs}
        assert held.keys() == manifest.keys()
        self.held |= held

    def weights_commit(self, version, digests):
        return []

    def lose(self, reason):
        self.reasons.append(reason)


def push(transport, version=1, buckets=BUCKETS, manifest=MANIFEST, lora=None) -> None:
    error = None
    try:
        transport.begin(version, manifest, lora)
        for bucket in buckets:
            transport.send(bucket)
        transport.commit(
            version, {target.name: [] for target in transport.targets}, lambda *answer: None
        )
    except Exception as failure:
        error = failure
        raise
    finally:
        transport.end(error)


def assert_held(target: Target) -> None:
    assert target.held.keys() == MANIFEST.keys()
    for bucket in BUCKETS:
        for name, tensor in bucket:
            assert torch.equal(target.held[name], tensor)


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
        laid_out = held.laid_out(bucket, pinned=False)
        assert [name for name, _ in laid_out] == [name for name, _ in bucket]
        assert all(
            torch.equal(copy, tensor)
            for (_, copy), (_, tensor) in zip(laid_out, bucket, strict=True)
        )
        assert len({tensor.untyped_storage().data_ptr() for _, tensor in laid_out}) == 1
        places.append(laid_out[0][1].data_ptr())
    assert places[1] == places[2] and held.tensors(small) is small  # already on the host
    monkeypatch.setattr(
        HostMemory, "tensors", lambda self, bucket: self.laid_out(bucket, pinned=False)
    )
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


def test_disk_keeps_the_newest_versions_and_the_base_they_stand_on(tmp_path):
    (tmp_path / "version_00000009").mkdir()  # an earlier run's
    target = Target(folder=tmp_path)
    transport = DiskTransport([target], folder=tmp_path)
    push(transport, 3, [*BUCKETS, LORA_BUCKET], MANIFEST | LORA_MANIFEST, LORA)
    for version in (4, 5, 6):
        changed = [(name, tensor + version) for name, tensor in LORA_BUCKET]
        push(transport, version, [changed], LORA_MANIFEST, LORA)
    assert disk.versions(tmp_path) == [3, 5, 6]
    stored = disk.newest(tmp_path)
    assert (
        stored.version == 6 and stored.lora == LORA and stored.manifest == MANIFEST | LORA_MANIFEST
    )
    held = {name: tensor for path in stored.files for name, tensor in load_file(path).items()}
    assert torch.equal(held["transformer.a"], BUCKETS[0][0][1])
    assert torch.equal(held["transformer.m.lora_B.weight"], torch.full((2, 1), 6.0))


def test_disk_removes_nothing_of_others_where_a_push_cannot_begin(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "version_00000009").write_text("no folder")
    transport = DiskTransport([Target(folder=tmp_path)], folder=tmp_path)
    with pytest.raises(NotADirectoryError) as caught:
        transport.begin(1, MANIFEST, None)
    transport.end(caught.value)
    assert (tmp_path / "notes.txt").read_text() == "mine"

    (tmp_path / "version_00000009").unlink()
    push(transport, 1)
    transport.end(OSError("of a push that never began"))
    assert disk.versions(tmp_path) == [1] and (tmp_path / "notes.txt").exists()


def test_disk_keeps_what_a_second_push_of_a_version_leaves_out(tmp_path):
    """As that of a lagging LoRA after an evaluation, for which replicas that slept got all."""
    transport = DiskTransport([Target(folder=tmp_path)], folder=tmp_path)
    push(transport, 3, [*BUCKETS, LORA_BUCKET], MANIFEST | LORA_MANIFEST, LORA)
    for version, factor in ((3, 4.0), (3, 5.0), (4, 6.0)):
        changed = [(name, torch.full_like(tensor, factor)) for name, tensor in LORA_BUCKET]
        push(transport, version, [changed], LORA_MANIFEST, LORA)
        stored = disk.newest(tmp_path)
        assert stored.version == version and stored.manifest == MANIFEST | LORA_MANIFEST
        held = {name: tensor for path in stored.files for name, tensor in load_file(path).items()}
        assert stored.fingerprints == fingerprints(held)
        assert torch.equal(held["transformer.a"], BUCKETS[0][0][1])
        assert (held["transformer.m.lora_B.weight"] == factor).all()
        names = [f"{path.parent.name}/{path.name}" for path in stored.files]
        assert [disk.locate(name, tmp_path) for name in names] == list(stored.files)


def test_disk_keeps_what_the_parts_of_a_version_stand_on(tmp_path):
    """Two components and their LoRA, pushed one at a time."""
    pair = {f"{part}.a": torch.zeros(4) for part in ("one", "two")}
    pair |= {f"{part}.m.lora_A.weight": torch.zeros(1, 2) for part in ("one", "two")}
    transport = DiskTransport([], folder=tmp_path)
    pushes = (
        (1, list(pair)),
        (2, ["two.m.lora_A.weight"]),
        (3, ["one.m.lora_A.weight"]),
        (4, ["one.a"]),
        (5, []),
    )
    for version, names in pushes:
        tensors = [(name, pair[name] + version) for name in names]
        push(transport, version, [tensors] if tensors else [], bucket_manifest(tensors), LORA)
    assert disk.versions(tmp_path) == [1, 2, 3, 4, 5]
    stored = disk.newest(tmp_path)
    held = {name: tensor for path in stored.files for name, tensor in load_file(path).items()}
    assert stored.manifest.keys() == pair.keys() and stored.version == 5
    values = {name: float((tensor - pair[name]).max()) for name, tensor in held.items()}
    assert values == {"one.a": 4, "two.a": 1, "one.m.lora_A.weight": 3, "two.m.lora_A.weight": 2}
    assert stored.fingerprints == fingerprints(held)
    plain = [(name, pair[name] + 6) for name in ("one.a", "two.a")]
    for version in (6, 7):  # without LoRA from now on
        push(transport, version, [plain], bucket_manifest(plain))
    stored = disk.newest(tmp_path)
    assert (
        disk.versions(tmp_path) == [6, 7]
        and stored.lora is None
        and stored.manifest.keys() == {"one.a", "two.a"}
    )


def test_disk_never_shows_half_a_version(tmp_path):
    def fault(number):
        assert disk.versions(tmp_path) == []
        if number == 1:
            raise ConnectionError("cut")

    transport = DiskTransport([Target(folder=tmp_path, fault=fault)], folder=tmp_path)
    with pytest.raises(ConnectionError):
        push(transport)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="holds no whole version of weights"):
        disk.newest(tmp_path)


def in_group(*targets: Target, timeout_s: float = transfers.TIMEOUT_S) -> GroupTransport:
    for place, target in enumerate(targets):
        target.name = f"replica_{place}"
    return GroupTransport(targets, device=CPU, num_workers=[1] * len(targets), timeout_s=timeout_s)


def test_a_group_is_kept_until_it_breaks():
    """A replica that refuses a bucket before it receives it leaves nobody waiting; the next push
    has a group of its own.
    """

    def fault(number):
        if number == 5:
            raise ConnectionError("cut")

    targets = [Target(), Target(fault=fault)]
    transport = in_group(*targets)
    groups = []
    for version in (1, 2):
        push(transport, version)
        groups.append(transport._description["group"])
        assert_held(targets[0])
        assert_held(targets[1])
    assert groups[0] == groups[1]
    start = time.monotonic()
    with pytest.raises(ConnectionError):
        push(transport, 3)
    assert time.monotonic() - start < 5
    targets[1].number = 10
    push(transport, 4)
    assert transport._description["group"] not in groups
    assert_held(targets[1])
    transport.close()


def test_a_group_that_not_everyone_joins():
    """Those that did join are told so, and wait no longer."""
    ended = threading.Event()

    class Waiting(Target):
        def weights_begin(self, version, manifest, *, lora, transport):
            try:
                super().weights_begin(version, manifest, lora=lora, transport=transport)
            finally:
                ended.set()

    class Absent(Target):
        def weights_begin(self, version, manifest, *, lora, transport):
            time.sleep(0.5)  # the other has joined
            raise ConnectionError("refused")

    start = time.monotonic()
    with pytest.raises(ConnectionError, match="refused"):
        push(in_group(Waiting(), Absent()))
    assert ended.wait(5) and time.monotonic() - start < 5


def test_a_replica_that_is_busy_for_long_joins_late():
    class Late(Target):
        def weights_begin(self, version, manifest, *, lora, transport):
            time.sleep(2)
            super().weights_begin(version, manifest, lora=lora, transport=transport)

    targets = [Target(), Late()]
    transport = in_group(*targets, timeout_s=1.0)
    push(transport, 1)
    assert_held(targets[0])
    assert_held(targets[1])
    transport.close()


@pytest.mark.parametrize("answers", [True, False])
def test_a_worker_that_closed_its_connection_is_named(answers):
    """gloo then refuses to begin a message, where others fail later."""

    class Silent(Target):
        def weights_bucket(self, bucket):
            time.sleep(2.5)  # longer than a message may take; until the fleet finds it hung
            raise ConnectionError("replica_1 has not answered for 2 s")

    targets = [Target(), Target() if answers else Silent()]
    transport = in_group(*targets, timeout_s=2.0)
    transport.begin(1, MANIFEST, None)
    targets[1].receiver._group._drop()
    time.sleep(0.5)  # until its connection is closed
    with pytest.raises(
        (ValueError, ConnectionError), match="not in group" if answers else "replica_1 has not"
    ):
        transport.send(BUCKETS[0])
    transport.end(ValueError())
    transport.close()


def wait_in_vain(number):
    raise GroupBrokeError("replica: nothing came")


def die(number):
    time.sleep(0.5)  # later than the others notice
    raise ConnectionError("reset by peer")


def say_nothing(number):
    time.sleep(3)


@pytest.mark.parametrize(
    ("fault", "has_served", "told", "lost"),
    [
        (die, True, "reset by peer", []),
        (wait_in_vain, True, "replica_2 broke.*nothing came", ["replica_0", "replica_2"]),
        (wait_in_vain, False, "replica_2 broke.*nothing came", []),
        (say_nothing, True, "the trainer and replica_2 broke", ["replica_2"]),
        (say_nothing, False, "the trainer and replica_2 broke", []),
    ],
)
def test_who_waited_in_vain_is_lost_only_where_nobody_else_has_failed(
    fault, has_served, told, lost
):
    """A broadcast between GPUs fails for all when one replica is gone. Of newcomers none is lost
    here: the run itself finds out which of them it can take.
    """
    targets = [Target(fault=wait_in_vain), Target(), Target(fault=fault)]
    targets[2].has_served = has_served
    transport = in_group(*targets, timeout_s=20.0)
    transport.patience_s = 1.0
    with pytest.raises((ConnectionError, SyncError), match=told):
        push(transport)
    assert [target.name for target in targets if target.reasons] == lost
    transport.close()


def test_a_replica_that_does_not_join_takes_nobody_along():
    """Those that joined say that they have waited in vain."""

    class Refusing(Target):
        def weights_begin(self, version, manifest, *, lora, transport):
            time.sleep(0.5)  # the other has joined
            raise ValueError("no memory for the weights")

    class Joining(Target):
        def weights_begin(self, version, manifest, *, lora, transport):
            try:
                super().weights_begin(version, manifest, lora=lora, transport=transport)
            except RuntimeError as error:
                assert group.BROKE in str(error)
                raise GroupBrokeError(str(error)) from error

    targets = [Joining(), Refusing()]
    with pytest.raises(ValueError, match="no memory for the weights"):
        push(in_group(*targets))
    assert not targets[0].reasons


def test_a_trainer_that_goes_leaves_a_worker_waiting_for_no_longer_than_its_limit():
    target = Target()
    transport = in_group(target, timeout_s=1.0)
    transport.begin(1, MANIFEST, None)
    source = {"transport": "nccl", "group": transport._description["group"], "tensors": MANIFEST}
    with pytest.raises(RuntimeError, match="did not come whole from the trainer"):
        target.weights_bucket(source)
    with pytest.raises(ValueError, match="not in group"):
        target.weights_bucket(source)
    transport.close()


DESCRIPTION = {
    "group": "a",
    "address": "127.0.0.1",
    "port": 1,
    "rank": 1,
    "world_size": 2,
    "timeout_s": 1.0,
}


@pytest.mark.parametrize("key", DESCRIPTION)
def test_a_description_of_no_group(key):
    with pytest.raises(ValueError, match=f"transport nccl needs '{key}'"):
        Member(CPU, worker=0).join(DESCRIPTION | {key: None})


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan"), 2 * transfers.TIMEOUT_S])
def test_a_trainer_cannot_hold_a_worker_for_longer_than_the_workers_own_limit(timeout_s):
    with pytest.raises(ValueError, match="must be above 0 and at most 30"):
        Member(CPU, worker=0).join(DESCRIPTION | {"timeout_s": timeout_s})


def test_a_message_of_another_size_or_bucket_is_not_taken():
    """gloo itself would fill the buffer in part, or end the process."""
    tags = {transfers.message_tag(number, size) for number in range(50) for size in range(50)}
    assert len(tags) == 2500 and all(0 <= tag < 2**31 for tag in tags)


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


def test_a_group_by_gloo_across_two_hosts():
    """Each end listens on its address that leads to the other, whatever its name stands for."""
    namespace = ["unshare", "-rn"]
    veth = [*namespace, *"ip link add cable0 type veth peer name cable1".split()]
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("network namespaces need unshare and ip (util-linux, iproute2)")
    refusal = subprocess.run(veth, capture_output=True, text=True)
    if refusal.returncode:
        pytest.skip(f"network namespaces are not permitted here: {refusal.stderr.strip()}")
    script = Path(__file__).with_name("two_hosts.py")
    root = str(Path(__file__).parents[3])
    done = subprocess.run(
        [*namespace, sys.executable, str(script), "trainer"],
        capture_output=True,
        text=True,
        timeout=90,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert done.returncode == 0, done.stderr[-3000:]
