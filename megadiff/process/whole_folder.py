"""A folder that appears whole or not at all: written aside, then renamed.

Beside DST stand `.DST.writing-*` while it is written, and `.DST.replaced-*` while an old one gives
way. A process that was killed leaves them. The next one clears up, as their locks are then free.
"""

from __future__ import annotations

import fcntl
import glob
import logging
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)
NUM_SPARE = 8  # descriptors: rmtree has two open for each level of folders
WRITING = "writing"
REPLACED = "replaced"


def check_destination(dst: Path, *, force: bool, sources: Sequence[Path]) -> None:
    """Raise ValueError when dst holds something (but for force), or overlaps one of the sources."""
    real_dst = dst.resolve()
    for source in sources:
        real_source = source.resolve()
        if real_dst == real_source:
            raise ValueError(f"{dst} is what is read ({source}); name another folder")
        if real_source in real_dst.parents:
            raise ValueError(f"{dst} lies in {source}, which is read; name a folder elsewhere")
        if real_dst in real_source.parents:
            raise ValueError(f"{dst} holds {source}, which is read; name a folder elsewhere")

    if dst.is_dir() and not any(dst.iterdir()):
        return

    if os.path.lexists(dst) and not force:
        raise ValueError(
            f"{dst} exists and is not an empty folder; remove it, name another one, or give --force"
        )
    if os.path.lexists(dst) and not dst.is_dir():
        raise ValueError(
            f"{dst} is no folder, --force replaces folders only; remove it or name another one"
        )


@contextmanager
def whole_folder(dst: Path, *, force: bool) -> Iterator[Path]:
    """Yield an empty folder that becomes dst when the block ends well, and is removed otherwise.

    force: an old dst is replaced. Raises OSError as writing does, and ValueError when dst holds
    something by then.
    """
    dst = dst.resolve()
    dst.parent.mkdir(parents=True, exist_ok=True)

    # Beside dst, as a rename stays within a filesystem.
    aside = _beside(dst, WRITING)
    aside.mkdir()
    lock = _locked(aside)
    # Held for rmtree, which opens folders: what fails may be that there are no descriptors left.
    spare = [os.open(aside, os.O_RDONLY) for _ in range(NUM_SPARE)]

    try:
        yield aside
        _replace(aside, dst, force=force)
    finally:
        for descriptor in spare:
            os.close(descriptor)
        shutil.rmtree(aside, ignore_errors=True)
        if aside.exists():
            logger.warning("%s could not be removed; it is a conversion that failed", aside)
        if lock is not None:
            os.close(lock)


def check_space(dst: Path, num_bytes: int) -> None:
    """Raise ValueError when the filesystem of dst has less than num_bytes free."""
    # The folders that dst is to lie in may not exist yet.
    above = next(folder for folder in dst.resolve().parents if folder.is_dir())
    free = shutil.disk_usage(above).free
    if num_bytes > free:
        raise ValueError(
            f"{dst} needs {num_bytes / 2**30:.2f} GiB, but {free / 2**30:.2f} GiB are free there; "
            "make room, or name another disk"
        )


def clear_up(dst: Path) -> None:
    """Remove what killed processes left; an old folder that was not replaced is put back."""
    dst = dst.resolve()
    for replaced in sorted(dst.parent.glob(_pattern(dst, REPLACED))):
        if os.path.lexists(dst):
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            replaced.rename(dst)

    for aside in dst.parent.glob(_pattern(dst, WRITING)):
        lock = _locked(aside)
        # No lock: another process is writing there.
        if lock is not None:
            shutil.rmtree(aside, ignore_errors=True)
            os.close(lock)


def _replace(aside: Path, dst: Path, *, force: bool) -> None:
    """Rename aside to dst. An old dst goes last, and comes back when that fails."""
    if not dst.is_dir() or not any(dst.iterdir()):
        os.replace(aside, dst)  # takes the place of an empty folder too
        sync_entry(dst.parent)
        return

    if not force:
        raise ValueError(f"{dst} was filled by another process meanwhile; name another folder")

    replaced = _beside(dst, REPLACED)
    dst.rename(replaced)
    try:
        os.replace(aside, dst)
    except BaseException:
        if not os.path.lexists(dst):
            replaced.rename(dst)
        raise

    sync_entry(dst.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _beside(dst: Path, state: str) -> Path:
    return dst.parent / f".{dst.name}.{state}-{uuid.uuid4().hex[:12]}"


def _pattern(dst: Path, state: str) -> str:
    return f".{glob.escape(dst.name)}.{state}-*"


def _locked(folder: Path) -> int | None:
    """Lock the folder for as long as the process lives, and return the descriptor.

    Returns None when another process has the lock, or where the filesystem has no locks. What is
    left there stays.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def sync_tree(folder: Path) -> None:
    """Flush all of a folder to the disk."""
    for parent, _, names in os.walk(folder):
        for name in names:
            sync_entry(Path(parent) / name)
        sync_entry(Path(parent))


def sync_entry(path: Path) -> None:
    """Flush a file or a folder's entries to the disk.

    A rename must never become durable before what it names.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
