"""The folder of disk pushes holds whole versions alone, whatever happens to a push."""

import errno
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megadiff.sync.bucket import BucketBody, bucket_manifest
from megadiff.sync.transports import disk
from megadiff.sync.transports.base import SyncError
from megadiff.sync.transports.disk import DiskTransport, StoredVersion
from megadiff.tensors.fingerprint import fingerprints
from megadiff.types import Tensors
from tests.unit.sync.push_target import (
    BUCKETS,
    LORA,
    LORA_BUCKET,
    LORA_MANIFEST,
    MANIFEST,
    Target,
    assert_held,
    push,
)


def read_files(stored: StoredVersion) -> Tensors:
    """Return what a replica that joins late loads."""
    return {name: tensor for path in stored.files for name, tensor in load_file(path).items()}


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
    held = read_files(stored)
    assert torch.equal(held["transformer.a"], BUCKETS[0][0][1])
    assert torch.equal(held["transformer.m.lora_B.weight"], torch.full((2, 1), 6.0))


def test_disk_removes_nothing_of_others_where_a_push_cannot_begin(tmp_path):
    folder = tmp_path / "weights"
    folder.write_text("no folder")
    transport = DiskTransport([Target(folder=folder)], folder=folder)
    with pytest.raises(FileExistsError) as caught:
        transport.begin(1, MANIFEST, None)
    transport.end(caught.value)
    assert folder.read_text() == "no folder"

    folder.unlink()
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    push(transport, 1)
    transport.end(OSError("of a push that never began"))
    assert disk.versions(folder) == [1] and (folder / "notes.txt").exists()


def test_a_disk_that_is_full_when_a_version_is_published_harms_no_other(tmp_path, monkeypatch):
    """The second push of a version keeps what the first one brought."""
    transport = DiskTransport([Target(folder=tmp_path)], folder=tmp_path)
    push(transport, 3, [*BUCKETS, LORA_BUCKET], MANIFEST | LORA_MANIFEST, LORA)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def full(path, *_, **__):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    rename = Path.rename

    def stale(path, target):
        if path.name.endswith(".part"):
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return rename(path, target)

    for name, fault, words in (
        ("write_text", full, "No space left"),
        ("rename", stale, "Stale file handle"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(Path, name, fault)
            with pytest.raises(SyncError, match=f"version 3 cannot be published in .*{words}"):
                push(transport, 3, [LORA_BUCKET], LORA_MANIFEST, LORA)
        files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        assert files == before, name


def test_disk_always_has_a_whole_version_when_the_sync_is_built_anew(tmp_path):
    """As after a replica was lost. What is later, or was never whole, goes."""
    target = Target(folder=tmp_path)
    push(DiskTransport([target], folder=tmp_path), 1)
    for name in ("version_00000007", "version_00000001.0123abcd.part"):
        (tmp_path / name).mkdir()
    seen = []
    target.fault = lambda number: seen.append(disk.versions(tmp_path))
    for version in (1, 2):
        push(DiskTransport([target], folder=tmp_path), version)
    assert seen == [[1]] * 4
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "version_00000001",
        "version_00000002",
    ]


def test_disk_goes_on_beside_folders_that_cannot_be_removed(tmp_path, monkeypatch):
    """NFS keeps files that a replica on this host has open."""
    target = Target(folder=tmp_path)
    transport = DiskTransport([target], folder=tmp_path)
    monkeypatch.setattr(disk, "_remove", lambda version: None)
    target.fault = lambda number: 1 / 0
    with pytest.raises(ZeroDivisionError):
        push(transport, 1)
    target.fault = lambda number: None
    for version in (1, 1, 1):
        push(DiskTransport([target], folder=tmp_path), version)
    assert disk.versions(tmp_path) == [1]
    assert_held(target)

    # Of a whole version that stays, late joiners would take the weights.
    other = DiskTransport([target], folder=tmp_path)
    with pytest.raises(PermissionError, match="version_00000001 is of another run and cannot"):
        other.begin(0, MANIFEST, None)


def test_disk_keeps_what_a_second_push_of_a_version_leaves_out(tmp_path):
    """As that of a lagging LoRA after an evaluation, for which replicas that slept got all."""
    transport = DiskTransport([Target(folder=tmp_path)], folder=tmp_path)
    push(transport, 3, [*BUCKETS, LORA_BUCKET], MANIFEST | LORA_MANIFEST, LORA)
    for version, factor in ((3, 4.0), (3, 5.0), (4, 6.0)):
        changed = [(name, torch.full_like(tensor, factor)) for name, tensor in LORA_BUCKET]
        push(transport, version, [changed], LORA_MANIFEST, LORA)
        stored = disk.newest(tmp_path)
        assert stored.version == version and stored.manifest == MANIFEST | LORA_MANIFEST
        held = read_files(stored)
        assert stored.fingerprints == fingerprints(held)
        assert torch.equal(held["transformer.a"], BUCKETS[0][0][1])
        assert (held["transformer.m.lora_B.weight"] == factor).all()
        names = [f"{path.parent.name}/{path.name}" for path in stored.files]
        assert [disk.locate(name, tmp_path) for name in names] == list(stored.files)


def test_disk_keeps_a_bucket_behind_which_some_of_its_tensors_come_again(tmp_path):
    """As after an evaluation's average, of which one bucket holds frozen and trained weights."""
    frozen = {"transformer~frozen.a": torch.zeros(2)}
    manifest = bucket_manifest(list(frozen.items()) + BUCKETS[0])
    transport = DiskTransport([], folder=tmp_path)
    push(transport, 5, [[*frozen.items(), *BUCKETS[0]]], manifest)
    for factor in (2.0, 3.0):
        policy = [(name, torch.full_like(tensor, factor)) for name, tensor in BUCKETS[0]]
        push(transport, 5, [policy], bucket_manifest(policy))
        stored = disk.newest(tmp_path)
        held = read_files(stored)
        assert stored.fingerprints == fingerprints(held) and held.keys() == manifest.keys()
        assert all((held[name] == factor).all() for name, _ in policy)
    assert len(stored.files) == 2  # the policy before is gone


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
    held = read_files(stored)
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


def test_disk_versions_of_two_runs_are_not_mixed(tmp_path):
    """Where locks do not reach: another run has put its own in place of the base of a LoRA."""
    first = DiskTransport([], folder=tmp_path)
    push(first, 1, [*BUCKETS, LORA_BUCKET], MANIFEST | LORA_MANIFEST, LORA)
    push(DiskTransport([], folder=tmp_path), 1)
    push(first, 2, [LORA_BUCKET], LORA_MANIFEST, LORA)
    with pytest.raises(ValueError, match="version 2 stands on version 1, which another run has"):
        disk.newest(tmp_path)


def test_a_full_disk_is_named_with_what_a_bucket_needs(tmp_path, monkeypatch):
    def full(self, path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(BucketBody, "write", full)
    words = rf"{tmp_path} has no room for a bucket of \d+ bytes, \d+ are free .*sync.folder"
    with pytest.raises(SyncError, match=words):
        push(DiskTransport([Target(folder=tmp_path)], folder=tmp_path))
    assert not list(tmp_path.iterdir())


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
