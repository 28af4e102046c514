"""Lock a folder that one run writes, and name its holder to the next run that wants it."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import IO

import psutil

from megadiff.process.identity import process_home
from megadiff.process.lifeline import launcher_pid

logger = logging.getLogger(__name__)
LOCK = ".lock"
WAIT_S = 60.0  # for a holder that is ending, or dead on another node: NFS gives its lock back late
RETRY_S = 0.5
# how filesystems without locks answer flock()
NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Who has the folder. launcher: the pid of its torchrun, 0 without one.

    run: its run's folder, '' where that is the one that is locked.
    """

    host: str
    pid: int
    launcher: int
    since: str
    run: str = ""

    def __str__(self) -> str:
        run = f"{self.run}, " if self.run else ""
        return f"{run}pid {self.pid} on {self.host.split('/')[0]} since {self.since}"

    def is_working(self) -> bool:
        """Say whether it is alive on this host, and its torchrun as well where it has one."""
        if self.host != process_home() or not psutil.pid_exists(self.pid):
            return False
        # a rank whose torchrun is gone saves what is whole and ends
        return not self.launcher or psutil.pid_exists(self.launcher)


def lock(
    folder: Path,
    stack: ExitStack,
    *,
    wait_s: float = WAIT_S,
    advice: str = "end it or wait for it, or give this one another run.name",
    run: str = "",
) -> None:
    """Take a folder until the stack closes or the process ends, however it does.

    advice: what to do where another one has it. run: the run's folder, where this is another one.
    Raises ValueError that names the holder: at once for one that works on this host, after wait_s
    for one that is dead, ending or elsewhere.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # "a+" keeps the holder's words
    file = stack.enter_context((folder / LOCK).open("a+", encoding="utf-8"))
    deadline = time.monotonic() + wait_s
    has_warned = False

    while not _taken(file, folder):
        holder = _holder(file)
        who = f"{folder} is in use by another run ({holder or 'which does not say its name'})"
        if (holder and holder.is_working()) or time.monotonic() > deadline:
            raise ValueError(f"{who}; {advice}")
        if not has_warned:
            logger.warning("%s, which may be ending or gone; waiting %.0f s for it", who, wait_s)
            has_warned = True
        time.sleep(RETRY_S)

    now = datetime.now().astimezone().isoformat(timespec="seconds")
    holder = Holder(
        host=process_home(), pid=os.getpid(), launcher=launcher_pid() or 0, since=now, run=run
    )
    # after the lock: until then the words are another holder's
    file.seek(0)
    file.truncate()
    json.dump(asdict(holder), file)
    file.flush()


def _taken(file: IO[str], folder: Path) -> bool:
    """Try to lock the file. Without locks on this filesystem the holder's own word must do."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        holder = _holder(file)
        if holder and holder.is_working() and holder.pid != os.getpid():
            return False
        logger.warning(
            "%s is on a filesystem without locks (%s): see to it that no run of another host uses "
            "it",
            folder,
            error.strerror,
        )
    return True


def _holder(file: IO[str]) -> Holder | None:
    try:
        file.seek(0)
        return Holder(**json.load(file))
    except (ValueError, TypeError):  # empty, torn, or of another version
        return None
