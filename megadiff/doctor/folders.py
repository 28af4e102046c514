"""Look at the folders that a run writes to: can it, whose clock do they have, is there space."""

from __future__ import annotations

import errno
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megadiff.doctor.finding import Finding, error, ok, size_text, warning
from megadiff.doctor.machine import GIB

SKEW_S = 2.0  # two clocks may be apart; some filesystems count whole seconds
LEAST_FREE = GIB  # where no model says how much a checkpoint takes: metrics, samples, logs
FIXES = {  # errno → what mends it
    errno.EROFS: "mount -o remount,rw the filesystem, or set {key} to another folder",
    errno.EACCES: "chown or chmod u+w {folder}, or set {key} to another folder",
    errno.EPERM: "chown or chmod u+w {folder}, or set {key} to another folder",
    errno.ENOTDIR: "{folder} is a file: move it away, or set {key} to another folder",
    errno.ENOSPC: "free space in {folder}, or set {key} to another disk",
    errno.EDQUOT: "free space in {folder}, as your quota is full, or set {key} to another disk",
}


@dataclass(frozen=True, kw_only=True)
class FolderFacts:
    """Hold what was seen of a folder.

    key: of the config. folder: as the config has it. existing: the nearest one that is there.
    refusal: errno of a file that could not be written, 0 for none. skew_s: how far the file's time
    lies outside of the time in which it was written, positive where the folder's clock is ahead.
    """

    key: str
    folder: Path
    existing: Path
    refusal: int
    skew_s: float
    free_bytes: int
    free_files: int


def probe_folder(key: str, folder: Path) -> FolderFacts:
    """Write a file into a folder, or into the nearest one above that exists, and remove it."""
    existing = folder.absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent

    refusal = 0
    skew_s = 0.0

    try:
        skew_s = _written_skew_s(existing)
    except OSError as failure:
        refusal = failure.errno or errno.EIO
    status = os.statvfs(existing)

    return FolderFacts(
        key=key,
        folder=folder,
        existing=existing,
        refusal=refusal,
        skew_s=skew_s,
        free_bytes=status.f_bavail * status.f_frsize,
        # filesystems that have no inodes say 0 of 0
        free_files=status.f_favail if status.f_files else 1,
    )


def _written_skew_s(folder: Path) -> float:
    path = folder / f".megadiff-doctor-{secrets.token_hex(4)}"
    before = time.time()
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)

    try:
        os.write(descriptor, b"\n")
        os.fsync(descriptor)
        # a file server gives its own time
        written = os.stat(path).st_mtime
    finally:
        os.close(descriptor)
        path.unlink()

    return outside(written, before=before, after=time.time())


def outside(clock: float, *, before: float, after: float) -> float:
    """Return how far a time lies outside of an interval, negative below it, 0 within."""
    return min(0.0, clock - before) or max(0.0, clock - after)


def folder_findings(facts: FolderFacts) -> Iterator[Finding]:
    """Yield whether a run can write there, and whether the folder's clock is this host's."""
    if facts.refusal:
        fix = FIXES.get(facts.refusal, "set {key} to another folder")
        yield error(
            facts.key,
            f"{facts.folder}: writing to {facts.existing} fails: {os.strerror(facts.refusal)}",
            fix=fix.format(key=facts.key, folder=facts.existing),
        )
        return

    where = "it" if facts.existing == facts.folder.absolute() else f"{facts.existing}, above it,"
    yield ok(facts.key, f"{facts.folder}: {where} is writable")
    yield skew_finding(f"clock of {facts.key}", facts.skew_s, who=str(facts.existing))


def skew_finding(name: str, skew_s: float, *, who: str) -> Finding:
    """Compare another clock's distance with what is allowed. who: has that clock."""
    text = f"{who} is {abs(skew_s):.1f} s {'ahead' if skew_s > 0 else 'behind'}"
    text += f", {SKEW_S:.1f} s are allowed"
    if abs(skew_s) <= SKEW_S:
        return ok(name, text)
    return error(name, text, fix="synchronise both hosts: chronyc makestep, or timedatectl")


def disk_finding(facts: FolderFacts, *, needed_bytes: int, what: str) -> Finding:
    """Compare free space with what checkpoints take. what: these bytes are for.

    needed_bytes: 0 where no model says it.
    """
    text = f"{facts.existing}: {size_text(facts.free_bytes)} free"
    fix = f"free space, set {facts.key} to another disk, or a smaller checkpoint.keep"
    if facts.free_files == 0:
        return error("disk", f"{text}, but 0 inodes; 1 is needed for every file", fix=fix)
    if not needed_bytes:
        text += f", at least {size_text(LEAST_FREE)} are needed beside checkpoints"
        if facts.free_bytes < LEAST_FREE:
            return error("disk", text, fix=fix)
        return ok("disk", f"{text}; a config or --model says how much they take")

    text += f", {size_text(needed_bytes)} are needed for {what}"
    if facts.free_bytes < needed_bytes:
        return error("disk", text, fix=fix)
    if facts.free_bytes < 1.5 * needed_bytes:
        return warning("disk", f"{text}; samples and exports come beside", fix=fix)
    return ok("disk", text)
