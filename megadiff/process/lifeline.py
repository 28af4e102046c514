"""Leave no orphan: a process ends with the one that it serves, however that one ends.

`python -m megadiff.process.lifeline PID MODULE ARGUMENT …` runs a module that does not do so.
"""

from __future__ import annotations

import logging
import os
import runpy
import select
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil

logger = logging.getLogger(__name__)


def exit_with(pid: int) -> None:
    """Kill this process and its children when process `pid` is gone, also by SIGKILL.

    Raises ValueError when there is no such process.
    """
    # Not PR_SET_PDEATHSIG: it fires when the parent's *thread* ends that started this process.
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        raise ValueError(
            f"process {pid} does not exist; --parent-pid is the process to exit with"
        ) from None
    watch(pidfd, lambda: _die(pid))


def watch(pidfd: int, then: Callable[[], object]) -> None:
    """Call `then` in a thread of its own when the process behind the pidfd is gone."""

    def wait() -> None:
        poll = select.poll()
        # A pidfd becomes readable when its process ends.
        poll.register(pidfd, select.POLLIN)
        poll.poll()
        then()

    threading.Thread(target=wait, name="lifeline", daemon=True).start()


def launcher_pid() -> int | None:
    """Return the pid of the torchrun that started this process, None where there is none.

    Raises ProcessLookupError when torchrun ended before this call, e.g. during our imports.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    parent = os.getppid()
    if not _starts_ranks(parent):
        raise ProcessLookupError("torchrun, which started this rank, is gone; start it again")
    return parent


def _starts_ranks(pid: int) -> bool:
    """Say whether it may be torchrun, and not the process that adopts orphans."""
    try:
        parent = psutil.Process(pid)
        if "python" in Path(parent.exe()).name:
            return True
        # A script that torchrun runs, and that starts this process, has its variables.
        return "TORCHELASTIC_RUN_ID" in parent.environ()
    except psutil.AccessDenied:  # another user's, as with sudo; or init
        return pid != 1
    except psutil.NoSuchProcess:  # it ends just now
        return False


def kill_children(*, session: int | None = None) -> None:
    """Kill every descendant of this process. session: only those of this session.

    multiprocessing's resource tracker is spared: it cleans up after them and ends by itself.
    """
    for child in psutil.Process().children(recursive=True):
        # The others die whatever happens with one: nobody would find them later.
        try:
            if session is not None and os.getsid(child.pid) != session:
                continue
            if not any("resource_tracker" in argument for argument in child.cmdline()):
                child.kill()
        except (psutil.Error, OSError):  # it has just ended, or is another user's by now
            continue


def _die(pid: int) -> None:
    logger.warning("process %d is gone; exiting with it", pid)
    kill_children()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    exit_with(int(sys.argv[1]))
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__")
