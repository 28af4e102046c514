"""Let others see where a process is, also one that hangs: every thread's Python stack, in a file.

A process announces itself, as SIGUSR2 would kill any that does not expect it. faulthandler writes
the stacks within the signal handler, so that a main thread in a C call is no obstacle.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import re
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from megadiff.observe.text_files import parse_line, write_whole
from megadiff.process.identity import process_home

logger = logging.getLogger(__name__)
FOLDER = "stacks"  # in a run's folder
SIGNAL = signal.SIGUSR2
WAIT_S = 5.0
POLL_S = 0.05
SKEW_S = 30.0  # by which a file server's clock may differ from this host's
# A separate replica, which outlives its run, has its address for a name.
OWN_NAMES = re.compile(r"(rank|replica)_\d+(_worker_\d+)?")
SETTLED_S = 0.3  # a file that has not grown for so long is whole


@dataclass(frozen=True, kw_only=True)
class Announcement:
    """Say who writes its stack when SIGNAL comes.

    home: as process_home() has it. started: clock ticks from the boot, as /proc tells them.
    job: of Slurm, "" without one.
    """

    name: str
    home: str
    pid: int
    started: int
    job: str = ""

    @property
    def host(self) -> str:
        return self.home.partition("/")[0]

    @property
    def is_here(self) -> bool:
        """Say whether its pid means the same process here."""
        return self.home == process_home()

    @property
    def is_listening(self) -> bool:
        """Say whether the very process that announced itself lives, and catches SIGNAL."""
        return self.started == _started(self.pid) and _catches(self.pid)

    def stack_file(self, folder: Path) -> Path:
        return folder / f"{self.name}.{self.pid}.txt"


def announce(folder: Path, name: str) -> None:
    """Write this process's stacks into the folder whenever SIGNAL comes, from now on.

    It only warns where the folder cannot be written: nothing but `megadiff stacks` needs it.
    """
    pid = os.getpid()
    announcement = Announcement(
        name=name,
        home=process_home(),
        pid=pid,
        started=_started(pid),
        job=os.environ.get("SLURM_JOB_ID", ""),
    )

    try:
        folder.mkdir(parents=True, exist_ok=True)
        _drop_ended(folder, name)
        # faulthandler keeps the file open
        file = announcement.stack_file(folder).open("w", encoding="utf-8")
        faulthandler.register(SIGNAL, file=file, all_threads=True)
        # Only now: until then the signal would kill this process.
        write_whole(folder / f"{name}.{pid}.json", json.dumps(asdict(announcement)))
    except OSError as error:
        logger.warning("%s: %s; `megadiff stacks` will not show this process", folder, error)


def drop_leftovers(folder: Path, *, began_s: float) -> None:
    """Remove what the run's own processes of earlier attempts have left, on any host.

    For rank 0, which has the run's lock: no earlier attempt goes on. began_s: the time when this
    attempt began. Other ranks may have announced themselves since.
    """
    with suppress(OSError):  # nothing but `megadiff stacks` needs it
        for path in folder.glob("*.json"):
            is_own = OWN_NAMES.fullmatch(path.name.rsplit(".", 2)[0])
            row = _read(path)
            if is_own and row is not None and path.stat().st_mtime < began_s - SKEW_S:
                _drop(row, path)


def announcements(folder: Path) -> list[Announcement]:
    """Return the processes that can be asked, by name, without those of this host that ended."""
    rows = [_read(path) for path in sorted(folder.glob("*.json"))]
    # Another host's pids mean nothing here.
    return [row for row in rows if row is not None and (not row.is_here or row.is_listening)]


def ask(folder: Path, asked: Sequence[Announcement], *, wait_s: float = WAIT_S) -> dict[int, str]:
    """Return pid → stacks of these processes of this host; wait at most wait_s for all.

    Without those that ended meanwhile, and with "" for one that did not answer.
    """
    begins = {row.pid: _size(row.stack_file(folder)) for row in asked}
    sent = [row for row in asked if _send(row)]
    deadline = time.monotonic() + wait_s
    sizes: dict[int, int] = {}
    grown_s = time.monotonic()

    while time.monotonic() < deadline:
        time.sleep(POLL_S)
        now = {row.pid: _size(row.stack_file(folder)) for row in sent}
        if now != sizes:
            sizes = now
            grown_s = time.monotonic()
        has_all = all(now[row.pid] > begins[row.pid] for row in sent)
        if has_all and time.monotonic() - grown_s > SETTLED_S:
            break

    return {row.pid: _text(row.stack_file(folder), begins[row.pid]) for row in sent}


def process_state(pid: int) -> str:
    """Return the letter of a process's state: R, S, D, T, Z as ps has them; "" without one."""
    fields = _stat(pid)
    return fields[0] if fields else ""


def _send(row: Announcement) -> bool:
    """Send SIGNAL to exactly the process that announced itself."""
    with suppress(OSError):
        # Opened before the check: if the process ends after it, nobody else gets the signal.
        pidfd = os.pidfd_open(row.pid)
        try:
            if row.is_listening:
                signal.pidfd_send_signal(pidfd, SIGNAL)
                return True
        finally:
            os.close(pidfd)
    return False


def _drop_ended(folder: Path, name: str) -> None:
    """Remove what earlier processes of this name and host have left."""
    for path in folder.glob(f"{name}.*.json"):
        row = _read(path)
        if row is not None and row.is_here:
            _drop(row, path)


def _drop(row: Announcement, path: Path) -> None:
    """Remove an announcement and its stacks, unless its process listens on this host."""
    if not (row.is_here and row.is_listening):
        row.stack_file(path.parent).unlink(missing_ok=True)
        path.unlink(missing_ok=True)


def _read(path: Path) -> Announcement | None:
    """Return what the file says; None for another version's, or one that has just been removed."""
    try:
        row = parse_line(path.read_text("utf-8"))
        return Announcement(**row)
    except (OSError, TypeError, UnicodeDecodeError):
        return None


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; [] for no process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace")
    except OSError:
        return []
    # The name before them may hold spaces and brackets.
    return text.rpartition(")")[2].split()


def _started(pid: int) -> int:
    """Return when a process began, in clock ticks from the boot; -1 for no process."""
    fields = _stat(pid)
    return int(fields[19]) if fields else -1


def _catches(pid: int) -> bool:
    """Say whether a process has a handler for SIGNAL; it would die of it otherwise."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text("utf-8").splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (SIGNAL - 1) & 1)
    return False


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _text(path: Path, begin: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(begin)
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
