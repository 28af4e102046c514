"""Transport `disk`: trainer and replicas share a folder of whole versions; late joiners load them.

    version_00000012/bucket_00000.safetensors … manifest.json

manifest.json holds the version, its lora, and for every tensor of this push its file, dtype, shape
and fingerprint. Its `parts` names, for each weight group, the version that holds it: an earlier one
for a group that this push did not bring. Those have the same `writer`. A version is written aside,
and renamed when every replica has it.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import re
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megadiff.sync.bucket import Bucket, BucketBody, bucket_manifest, encode_bucket
from megadiff.sync.transports.base import PushTarget, SyncError, Transport
from megadiff.sync.transports.host_memory import HostMemory
from megadiff.tensors.fingerprint import fingerprints
from megadiff.tensors.lora_names import lora_from_json
from megadiff.tensors.manifest import Manifest
from megadiff.tensors.model_files import read_json
from megadiff.tensors.weight_groups import (
    WeightGroup,
    names_by_weight_group,
    rows_of_weight_groups,
    weight_group_of,
)
from megadiff.types import LoraSpec

NUM_KEPT = 2  # newest versions: a late joiner may be reading the one before
MANIFEST = "manifest.json"
_VERSION = re.compile(r"version_(\d{8})")
# A version that is written or about to go. Its name is drawn: NFS may keep an earlier one.
_ASIDE = re.compile(r"version_\d{8}\.[0-9a-f]{8}\.(part|old)")
_FILE = re.compile(  # a bucket as a request names it
    r"version_\d{8}(\.[0-9a-f]{8}\.part)?/bucket_\d{5}\.safetensors"
)


class DiskTransport(Transport):
    """Write versions into the folder of one run, as its only writer."""

    name = "disk"

    def __init__(self, targets: Sequence[PushTarget], *, folder: Path) -> None:
        super().__init__(targets)
        self.folder = folder
        self._aside: Path | None = None  # until a push has begun
        self._first_bucket = 0
        self._memory = HostMemory()
        # The version that holds each weight group: on disk, and once the open push is whole.
        self._versions: dict[WeightGroup, int] = {}
        self._next_versions: dict[WeightGroup, int] = {}
        self._manifest: dict[str, Any] = {}
        self._writer = secrets.token_hex(8)

    def begin(self, version: int, manifest: Manifest, lora: LoraSpec | None) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self._versions:
            # Of a trainer that was killed, or before this was built anew. Versions up to this one
            # stay until it is whole: a late joiner needs one.
            remove(self.folder, after=version)

        aside = _aside(self.folder, version, "part")
        aside.mkdir()
        self._aside = aside
        # Behind those of an earlier push of this version. Kept ones may hold tensors that this push
        # brings anew, and a late joiner goes by the numbers.
        self._first_bucket = _next_bucket(_version_folder(self.folder, version))

        # Without a LoRA the replicas drop an earlier one, so a late joiner must not load it.
        self._next_versions = {
            group: earlier for group, earlier in self._versions.items() if lora or not group.is_lora
        }
        self._next_versions |= dict.fromkeys(names_by_weight_group(manifest), version)

        self._manifest = {
            "version": version,
            "writer": self._writer,
            "parts": {str(group): number for group, number in self._next_versions.items()},
            "lora": dataclasses.asdict(lora) if lora else None,
            "push": secrets.token_hex(8),
            "tensors": {},
        }

        super().begin(version, manifest, lora)

    def send(self, bucket: Bucket) -> None:
        assert self._aside is not None, "a push has begun"
        tensors = self._memory.tensors(bucket)
        files = {row["file"] for row in self._manifest["tensors"].values()}
        path = self._aside / f"bucket_{self._first_bucket + len(files):05d}.safetensors"
        self._write(encode_bucket(tensors), path)

        source = {"transport": self.name, "file": f"{self._aside.name}/{path.name}"}
        requests = self.start(lambda target: target.weights_bucket(source))

        # While the replicas read the file.
        digits = fingerprints(dict(tensors))
        for name, row in bucket_manifest(bucket).items():
            self._manifest["tensors"][name] = {
                "file": path.name,
                **row,
                "fingerprint": digits[name],
            }

        self.wait(requests)

    def _write(self, body: BucketBody, path: Path) -> None:
        try:
            body.write(path)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            free = shutil.disk_usage(self.folder).free
            raise SyncError(
                f"{self.folder} has no room for a bucket of {len(body)} bytes, {free} are free "
                f"({error.strerror}); make room, as the newest {NUM_KEPT} versions stay while one "
                "is written, or set another sync.folder"
            ) from error

    def end(self, error: BaseException | None) -> None:
        aside = self._aside
        self._aside = None
        if aside is None:
            return  # the push failed before it wrote anything
        try:
            if error is None:
                self._publish(aside)
        except OSError as problem:
            raise SyncError(
                f"version {self._manifest['version']} cannot be published in {self.folder} "
                f"({problem}); see to that folder, or set another sync.folder"
            ) from problem
        finally:
            shutil.rmtree(aside, ignore_errors=True)  # where it has not got its name

    def _publish(self, aside: Path) -> None:
        """Make the version visible, and remove older ones that no kept version needs."""
        self._keep_groups_of_same_version(aside)
        (aside / MANIFEST).write_text(json.dumps(self._manifest), encoding="utf-8")
        version = self._manifest["version"]
        whole = _version_folder(self.folder, version)
        old = _aside(self.folder, version, "old")
        # It is there when the same version is pushed again, as after Fleet.sleep().
        if whole.exists():
            whole.rename(old)
        try:
            aside.rename(whole)
        except OSError:
            if old.exists():
                old.rename(whole)
            raise
        _remove(old)

        self._versions = self._next_versions
        all_versions = versions(self.folder)
        needed = set(all_versions[-NUM_KEPT:])
        for version in all_versions[-NUM_KEPT:]:
            needed.update(_read_manifest(self.folder, version)["parts"].values())
        for version in set(all_versions) - needed:
            _remove(_version_folder(self.folder, version))

    def _keep_groups_of_same_version(self, aside: Path) -> None:
        """Take over what an earlier push of this version brought, and this one leaves out.

        Two policies of one version follow each other where one of them is an average: the second
        may bring less, such as the LoRA alone.
        """
        version = self._manifest["version"]
        new_rows = self._manifest["tensors"]
        kept_groups = {
            group for group, holder in self._next_versions.items() if holder == version
        } - names_by_weight_group(new_rows).keys()
        if not kept_groups:
            return
        rows = _read_manifest(self.folder, version)["tensors"]
        rows = rows_of_weight_groups(rows, kept_groups)
        for file in {row["file"] for row in rows.values()}:
            # not renamed: what may fail from here on must leave that version whole
            _link(_version_folder(self.folder, version) / file, aside / file)
        self._manifest["tensors"] |= rows


def remove(folder: Path, *, after: int = -1) -> None:
    """Remove later versions than this, and what is not whole: by default all that a run left."""
    for path in folder.glob("version_*"):
        match = _VERSION.fullmatch(path.name)
        if _ASIDE.fullmatch(path.name) or (match and int(match[1]) > after):
            _remove(path)
        if match and int(match[1]) > after and (path / MANIFEST).exists():
            raise PermissionError(
                f"{path} is of another run and cannot be removed; remove it, or set sync.folder to "
                "a folder of this run's own"
            )


def _aside(folder: Path, version: int, kind: str) -> Path:
    """Return a new name. kind: part or old."""
    return folder / f"version_{version:08d}.{secrets.token_hex(4)}.{kind}"


def _link(file: Path, name: Path) -> None:
    """Give a file a second name, or a copy where the filesystem knows no such names."""
    try:
        name.hardlink_to(file)
    except OSError:
        shutil.copyfile(file, name)


def _remove(version: Path) -> None:
    """Remove a version's folder as far as it goes.

    NFS keeps files that a replica on this host has open: no reason to end a run.
    """
    shutil.rmtree(version, ignore_errors=True)


@dataclass(frozen=True, kw_only=True)
class StoredVersion:
    """A whole version on disk.

    push: which of those that brought this version, as an evaluation's and the next step's.
    files: in the order to load them in; of a name that comes again, the last one counts.
    manifest: of all tensors. fingerprints: name → digits of what was written.
    """

    version: int
    push: str
    lora: LoraSpec | None
    files: tuple[Path, ...]
    manifest: Manifest
    fingerprints: dict[str, str]


def versions(folder: Path) -> list[int]:
    """Return the whole versions in a folder, in order."""
    numbers = []
    for path in folder.glob("version_*"):
        match = _VERSION.fullmatch(path.name)
        if match and (path / MANIFEST).is_file():
            numbers.append(int(match[1]))
    return sorted(numbers)


def newest(folder: Path) -> StoredVersion:
    """Read the newest whole version's manifest, and those of the versions that it builds on.

    Raises ValueError when there is no whole version, or something else in its manifest.
    """
    whole_versions = versions(folder)
    if not whole_versions:
        raise ValueError(
            f"{folder} holds no whole version of weights; is it the sync.folder of a run with "
            "sync.transport=disk?"
        )

    top = _read_manifest(folder, whole_versions[-1])
    holders = top["parts"]

    files = set()
    manifest: Manifest = {}
    digits = {}
    for version in sorted(set(holders.values())):
        holder = _read_manifest(folder, version)
        if holder["writer"] != top["writer"]:
            raise ValueError(
                f"{folder}: version {top['version']} stands on version {version}, which another "
                "run has replaced; give each run a sync.folder of its own"
            )
        for name, row in holder["tensors"].items():
            # A later version may have brought this group again.
            if holders.get(str(weight_group_of(name))) == version:
                files.add(_version_folder(folder, version) / row["file"])
                manifest[name] = {"dtype": row["dtype"], "shape": row["shape"]}
                digits[name] = row["fingerprint"]

    return StoredVersion(
        version=top["version"],
        push=top["push"],
        lora=lora_from_json(top["lora"]),
        files=tuple(sorted(files)),
        manifest=manifest,
        fingerprints=digits,
    )


def locate(name: object, folder: Path | None) -> Path:
    """Return a bucket's file by its name within the folder. Raises ValueError for another path."""
    if folder is None:
        raise ValueError(
            "this replica was started without --weights; give it the trainer's sync.folder"
        )

    # Our own names only: a request must not choose what file the replica reads.
    if not isinstance(name, str) or not _FILE.fullmatch(name):
        raise ValueError(f"file={name!r:.100} is not the name of a bucket in {folder}")

    path = folder / name
    if not path.is_file():
        raise ValueError(
            f"{path} does not exist; --weights must be the trainer's sync.folder, on this host, too"
        )
    return path


def _version_folder(folder: Path, version: int) -> Path:
    return folder / f"version_{version:08d}"


def _next_bucket(version: Path) -> int:
    """Return one more than the highest number of a version's buckets, 0 without any."""
    numbers = [int(path.stem.removeprefix("bucket_")) for path in version.glob("bucket_*")]
    return max(numbers, default=-1) + 1


def _read_manifest(folder: Path, version: int) -> dict[str, Any]:
    return read_json(_version_folder(folder, version) / MANIFEST)
