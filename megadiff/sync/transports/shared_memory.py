"""Transport `shm` on a host: a bucket is a file in shared memory, which its replicas map.

Replicas also keep the body of an HTTP bucket in such a file. A file's name tells which process owns
it, so that files of a killed process are recognized and removed.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from megadiff.sync.bucket import Bucket
from megadiff.sync.transports.base import PushTarget, SyncError, Transport
from megadiff.sync.transports.host_memory import HostMemory

FOLDER = Path("/dev/shm")
PREFIX = "megadiff-bucket-"
# The owner's process id namespace, its process id, a counter.
_NAME = re.compile(rf"{PREFIX}(\d+)-(\d+)-\d+")
_counter = itertools.count()


class SharedMemoryTransport(Transport):
    """Write a bucket into a file in shared memory, and name it to the targets."""

    name = "shm"

    def __init__(self, targets: Sequence[PushTarget]) -> None:
        super().__init__(targets)
        self._memory = HostMemory()
        sweep()

    def send(self, bucket: Bucket) -> None:
        with bucket_file() as path:
            body = self._memory.body(bucket)
            try:
                body.write(path)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                raise SyncError(
                    f"{FOLDER} has no room for a bucket of {len(body)} bytes ({error.strerror}); "
                    "give it more, set a smaller sync.bucket_mib, or sync.transport=http"
                ) from error

            source = {"transport": self.name, "file": path.name}
            self.wait(self.start(lambda target: target.weights_bucket(source)))


@contextmanager
def bucket_file() -> Iterator[Path]:
    """Create an empty file of this process in shared memory; remove it at the end."""
    path = FOLDER / f"{PREFIX}{_namespace()}-{os.getpid()}-{next(_counter)}"
    # For its user only: other users of the host have no business with the weights.
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def locate(name: object) -> Path:
    """Return the file of that name in shared memory.

    Raises ValueError for a name that no bucket has, and where there is no such file.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"file={name!r:.100} is not the name of a bucket in {FOLDER}")

    path = FOLDER / name
    try:
        status = path.lstat()
    except FileNotFoundError:
        raise ValueError(
            f"{path} does not exist for this replica; it must share {FOLDER} with the trainer, "
            "or set sync.transport=http"
        ) from None

    # lstat above: a link could lead out of the folder.
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
        raise ValueError(f"{path} is no file of this replica's user")
    return path


def sweep() -> None:
    """Remove the buckets of processes that are gone."""
    for path in FOLDER.glob(f"{PREFIX}*"):
        # Other containers' files stay: their process ids mean nothing here.
        match = _NAME.fullmatch(path.name)
        if match and int(match[1]) == _namespace() and not Path(f"/proc/{match[2]}").exists():
            # Another user's are theirs to remove.
            with suppress(PermissionError):
                path.unlink(missing_ok=True)


def _namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino
