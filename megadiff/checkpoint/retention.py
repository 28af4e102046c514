"""Say which checkpoints of a run's folder stay, which is the newest, and remove the others.

A checkpoint is whole before any of this begins, so none of it may end a run.
"""

from __future__ import annotations

import logging
import re
import shutil
import time
from pathlib import Path

from megadiff.checkpoint.run_folders import whole_looking
from megadiff.observe.step_folders import step_folders
from megadiff.process.whole_folder import sync_entry

logger = logging.getLogger(__name__)
# Hidden, and unlike step_*: whole_looking() sees neither of them.
ASIDE = ".writing_"  # in front of a folder that is being written
OLD = ".old_"  # in front of one that is being removed
GIVEN_UP = "given_up_"  # nothing deletes these: they may be the better history
LATEST = "latest"


def put_away_other_history(folder: Path, step: int) -> None:
    """Rename checkpoints of this step and later ones.

    They are of a run that was given up: resumed from an earlier step, or started over.
    """
    for other_step, other in step_folders(folder):
        if other_step >= step:
            logger.warning(
                "%s belongs to another history of this run and is kept as %s*", other, GIVEN_UP
            )
            other.rename(folder / f"{GIVEN_UP}{other.name}_{time.time_ns()}")


def move_latest(folder: Path, name: str) -> None:
    """Let `latest` name a checkpoint. Where the disk refuses, it goes on naming an earlier one."""
    aside = folder / f"{ASIDE}{LATEST}"
    try:
        aside.write_text(name, encoding="utf-8")
        sync_entry(aside)
        aside.rename(folder / LATEST)
    except OSError as error:
        logger.warning("%s is whole, but %s does not name it: %s", name, folder / LATEST, error)


def check_latest(folder: Path) -> None:
    """Raise ValueError when `latest` names a checkpoint that is newer than all there are.

    Going on from an older one would hide the loss.
    """
    pointer = folder / LATEST
    if not pointer.is_file():
        return
    name = pointer.read_bytes().decode("utf-8", errors="replace")
    folders = whole_looking(folder)
    newest = folders[-1].name if folders else "none"
    if not re.fullmatch(r"step_[0-9]{6,}", name):
        raise ValueError(
            f"{pointer} is corrupt, it holds {name!r:.100}; remove it to go on from the "
            f"newest, {newest}"
        )

    was_given_up = any(folder.glob(f"{GIVEN_UP}{name}_*"))  # killed before `latest` moved
    step = int(name.removeprefix("step_"))
    if was_given_up or any(other_step >= step for other_step, _ in step_folders(folder)):
        return
    raise ValueError(
        f"{pointer} names {name}, which is not there; the newest is {newest}. Restore {name}, "
        f"or remove {pointer} to go on from {newest}"
    )


def remove_old(folder: Path, *, keep: int) -> None:
    """Remove all checkpoints but the newest `keep`, as far as the disk lets it."""
    for old in whole_looking(folder)[:-keep]:
        hidden = folder / f"{OLD}{old.name}"
        try:
            # First: a run must not find the rest of one under a checkpoint's name.
            old.rename(hidden)
        except OSError as error:
            logger.warning("%s is old and cannot be removed: %s", old, error)
            continue
        _remove(hidden)


def remove_leftovers(folder: Path) -> None:
    """Remove what earlier attempts of the run did not finish writing, or removing.

    The caller holds the run's lock, and its ranks have not begun to write: a rescue's folder has
    files of other ranks that this process does not know of.
    """
    for leftover in (*folder.glob(f"{ASIDE}step_*"), *folder.glob(f"{OLD}step_*")):
        _remove(leftover)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    # NFS keeps files that a process on this host has open, and their folder.
    if folder.exists():
        logger.warning("%s cannot be removed; the next start of the run tries again", folder)
