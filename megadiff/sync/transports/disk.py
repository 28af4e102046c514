"""Transport `disk`: a folder that trainer and replicas share holds whole versions, which late joiners load as well.

    version_00000012/bucket_00000.safetensors … manifest.json

manifest.json: version, lora, for every tensor of this push its file, dtype, shape and fingerprint, and parts: of each part of
the weights the version that holds it, an earlier one for what this push left as it was. A version is written aside and
renamed when every replica holds it.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megadiff.sync.bucket import Bucket, bucket_manifest, encode_bucket
from megadiff.sync.transports.base import Transport, WeightTarget
from megadiff.sync.transports.host_memory import HostMemory
from megadiff.tensors.fingerprint import fingerprints
from megadiff.tensors.lora_names import lora_from_json
from megadiff.tensors.manifest import Manifest
from megadiff.tensors.model_files import read_json
from megadiff.tensors.weight_groups import WeightGroup, names_by_weight_group, weight_group_of
from megadiff.types import LoraSpec

KEPT = 2  # newest versions: a late joiner may be reading the one before
MANIFEST = "manifest.json"
_VERSION = re.compile(r"version_(\d{8})")
_FILE = re.compile(r"version_\d{8}(\.part)?/bucket_\d{5}\.safetensors")


class DiskTransport(Transport):
    """folder: of one run; this is its only writer."""

    name = "disk"

    def __init__(self, targets: Sequence[WeightTarget], *, folder: Path) -> None:
        super().__init__(targets)
        self.folder = folder
        self._part = folder
        self._memory = HostMemory()
        self._pending: dict[WeightGroup, int] = {}  # of the push that is open
        self._manifest: dict[str, Any] = {}
        self._held: dict[WeightGroup, int] = {}  # the version that holds each part

    def begin(self, version: int, manifest: Manifest, lora: LoraSpec | None) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self._held:
            clear(self.folder)  # what an earlier run, or a trainer that was killed, left there
        self._part = self.folder / f"version_{version:08d}.part"
        self._part.mkdir()
        kept = {part: held for part, held in self._held.items() if lora or not part.is_lora}
        self._pending = kept | dict.fromkeys(names_by_weight_group(manifest), version)
        self._manifest = {
            "version": version,
            "parts": {str(part): held for part, held in self._pending.items()},
            "lora": dataclasses.asdict(lora) if lora else None,
            "tensors": {},
        }
        super().begin(version, manifest, lora)

    def send(self, bucket: Bucket) -> None:
        tensors, rows = self._memory.tensors(bucket), bucket_manifest(bucket)
        files = {row["file"] for row in self._manifest["tensors"].values()}
        path = self._part / f"bucket_{len(files):05d}.safetensors"
        encode_bucket(tensors).write(path)
        source = {"transport": self.name, "file": f"{self._part.name}/{path.name}"}
        requests = self.start(lambda target: target.weights_bucket(source))
        prints = fingerprints(dict(tensors))
        self._manifest["tensors"] |= {
            name: {"file": path.name, **row, "fingerprint": prints[name]}
            for name, row in rows.items()
        }
        self.wait(requests)

    def end(self, error: BaseException | None) -> None:
        if error is None:
            self._publish()
        else:
            shutil.rmtree(self._part, ignore_errors=True)

    def _publish(self) -> None:
        """The version becomes visible, and older ones go."""
        (self._part / MANIFEST).write_text(json.dumps(self._manifest), encoding="utf-8")
        whole = self._part.with_suffix("")
        shutil.rmtree(whole, ignore_errors=True)
        self._part.rename(whole)
        self._held = self._pending
        newest = versions(self.folder)[-KEPT:]
        used = {
            held
            for one in newest
            for held in read_json(_place(self.folder, one) / MANIFEST)["parts"].values()
        }
        for held in set(versions(self.folder)) - set(newest) - used:
            shutil.rmtree(_place(self.folder, held))


def clear(folder: Path) -> None:
    """Removes all versions: those of a run that starts anew, or that goes on from before them."""
    for path in folder.glob("version_*"):
        if _VERSION.fullmatch(path.name.removesuffix(".part")):
            shutil.rmtree(path)


@dataclass(frozen=True, kw_only=True)
class StoredVersion:
    """A whole version. files: in order; manifest: of all tensors; fingerprints: name → digits of what was written."""

    version: int
    lora: LoraSpec | None
    files: tuple[Path, ...]
    manifest: Manifest
    fingerprints: dict[str, str]


def versions(folder: Path) -> list[int]:
    """The whole versions in a folder, in order."""
    found = (
        _VERSION.fullmatch(path.name)
        for path in folder.glob("version_*")
        if (path / MANIFEST).is_file()
    )
    return sorted(int(match[1]) for match in found if match)


def newest(folder: Path) -> StoredVersion:
    """Raises ValueError when there is no whole version, or something else in its manifest."""
    held = versions(folder)
    if not held:
        raise ValueError(
            f"{folder} holds no whole version of weights; is it the sync.folder of a run with sync.transport=disk?"
        )
    top = read_json(_place(folder, held[-1]) / MANIFEST)
    rows = {
        name: (_place(folder, version) / row["file"], row)
        for version in sorted(set(top["parts"].values()))
        for name, row in read_json(_place(folder, version) / MANIFEST)["tensors"].items()
        if top["parts"].get(str(weight_group_of(name))) == version
    }
    return StoredVersion(
        version=top["version"],
        lora=lora_from_json(top["lora"]),
        files=tuple(sorted({path for path, _ in rows.values()})),
        manifest={
            name: {"dtype": row["dtype"], "shape": row["shape"]} for name, (_, row) in rows.items()
        },
        fingerprints={name: row["fingerprint"] for name, (_, row) in rows.items()},
    )


def locate(name: object, folder: Path | None) -> Path:
    """A bucket's file by its name within the folder. Raises ValueError for any other path."""
    if folder is None:
        raise ValueError(
            "this replica was started without --weights; give it the trainer's sync.folder"
        )
    if not isinstance(name, str) or not _FILE.fullmatch(name):
        raise ValueError(f"file={name!r:.100} is not the name of a bucket in {folder}")
    if not (folder / name).is_file():
        raise ValueError(
            f"{folder / name} does not exist; --weights must be the trainer's sync.folder, on this host, too"
        )
    return folder / name


def _place(folder: Path, version: int) -> Path:
    return folder / f"version_{version:08d}"
