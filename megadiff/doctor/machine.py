"""Look at what the system grants: shared memory, limits of a process, ports."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from megadiff.doctor.finding import Finding, error, ok, size_text, warning
from megadiff.process.network import LARGEST_PORT

SHARED_MEMORY = Path("/dev/shm")
INFINIBAND = Path("/sys/class/infiniband")
GIB = 2**30
MIB = 2**20
# queues of vLLM's workers and NCCL's buffers; a container gives 64 MiB where nothing is said
QUEUE_BYTES = 256 * MIB
NUM_BUCKETS = 2  # of sync.bucket_mib, alive at a time
OPEN_FILES = 4096  # sockets, shards, shared tensors; the limit of a process
OTHER_FILES = 1024  # beside the sockets of a large world
STACK_BYTES = 8 * MIB  # of a thread; compilers recurse deeply
UNLIMITED = resource.RLIM_INFINITY
RENDEZVOUS_PORT = 29500  # launch/torchrun.sh
SERVE_PORT = 8000  # `megadiff serve MODEL`


@dataclass(frozen=True, kw_only=True)
class ProcessLimits:
    """Hold a process's limits, UNLIMITED for none. open_files: the hard one, as we raise the soft.

    locked, stack: in bytes. has_infiniband: whether a network card locks memory.
    """

    open_files: int
    locked: int
    stack: int
    has_infiniband: bool


def shared_memory_finding(free_bytes: int, *, bucket_mib: int, is_decided: bool) -> Finding:
    """Compare the free shared memory with two buckets of a push and the libraries' queues.

    is_decided: whether a config gave bucket_mib; the default may be more than a run sends.
    """
    needed = QUEUE_BYTES + NUM_BUCKETS * bucket_mib * MIB
    text = (
        f"{size_text(free_bytes)} free, {size_text(needed)} are needed for {NUM_BUCKETS} "
        f"buckets of sync.bucket_mib={bucket_mib} and the queues of vLLM and NCCL"
    )
    if free_bytes >= needed:
        return ok("/dev/shm", text)
    fix = (
        f"docker run --shm-size={needed // GIB + 1}g or --ipc=host, "
        f"mount -o remount,size={needed // GIB + 1}G /dev/shm, or a smaller sync.bucket_mib"
    )
    if is_decided or free_bytes < QUEUE_BYTES:
        return error("/dev/shm", text, fix=fix)
    return warning("/dev/shm", text, fix=fix)


def shared_memory_free() -> int:
    """Return the bytes that are free in /dev/shm. Raises OSError where there is none."""
    status = os.statvfs(SHARED_MEMORY)
    return status.f_bavail * status.f_frsize


def read_limits() -> ProcessLimits:
    """Read this process's limits, which its ranks and replicas inherit."""
    _, open_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    return ProcessLimits(
        open_files=open_files,
        locked=locked,
        stack=stack,
        has_infiniband=INFINIBAND.is_dir() and any(INFINIBAND.iterdir()),
    )


def limit_findings(limits: ProcessLimits, *, num_sockets: int = 0) -> Iterator[Finding]:
    """Yield what to say of open files, locked memory and the stack.

    num_sockets: of a rank to its world, 0 where the world is not known.
    """
    needed = max(OPEN_FILES, num_sockets + OTHER_FILES)
    text = f"{_count(limits.open_files)} files may be open, {needed} are needed"
    if _is_at_least(limits.open_files, needed):
        yield ok("ulimit -Hn", text)
    else:
        yield error("ulimit -Hn", text, fix=f"ulimit -Hn {needed} as root, or limits.conf")

    locked = "unlimited" if limits.locked == UNLIMITED else size_text(limits.locked)
    text = f"{locked} may be locked"
    if limits.has_infiniband and limits.locked != UNLIMITED:
        yield error(
            "ulimit -l",
            f"{text}, InfiniBand needs unlimited",
            fix="docker run --ulimit memlock=-1, or 'memlock unlimited' in limits.conf",
        )
    else:
        yield ok("ulimit -l", f"{text}; only InfiniBand needs unlimited")

    stack = "unlimited" if limits.stack == UNLIMITED else size_text(limits.stack)
    text = f"{stack} of stack, {size_text(STACK_BYTES)} are needed"
    if _is_at_least(limits.stack, STACK_BYTES):
        yield ok("ulimit -s", text)
    else:
        yield warning("ulimit -s", text, fix=f"ulimit -s {STACK_BYTES // 1024}")


def compiler_finding(compiler: str | None, header: Path, *, is_needed: bool) -> Finding:
    """Say whether torch.compile can build its launchers.

    compiler: its path, None for none. header: Python.h. is_needed: whether the config compiles.
    """
    text = f"{compiler or 'no C compiler'}, {header}{'' if header.is_file() else ' is not there'}"
    if compiler and header.is_file():
        return ok("compiler", text)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    fix = f"apt install gcc g++ python{version}-dev, or engine.compile=false rollout.compile=false"
    if is_needed:
        return error("compiler", f"{text}; compiled blocks need both", fix=fix)
    return warning("compiler", f"{text}; engine.compile and rollout.compile need both", fix=fix)


def find_compiler() -> tuple[str | None, Path]:
    """Return the C compiler that torch and Triton take, and where this Python's headers begin."""
    names = [os.environ.get("CC", ""), "gcc", "clang"]
    compiler = next(filter(None, map(shutil.which, filter(None, names))), None)
    return compiler, Path(sysconfig.get_path("include"), "Python.h")


def _is_at_least(limit: int, needed: int) -> bool:
    return limit == UNLIMITED or limit >= needed


def _count(limit: int) -> str:
    return "any number of" if limit == UNLIMITED else str(limit)


def port_findings(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Try the ports that a run and a replica take by default, or that the environment names.

    Raises ValueError for a MASTER_PORT that is none.
    """
    named = environment.get("MASTER_PORT", "")
    rendezvous = int(named) if named.isdecimal() else RENDEZVOUS_PORT
    if named and not (named.isdecimal() and 0 < rendezvous <= LARGEST_PORT):
        raise ValueError(
            f"MASTER_PORT={named} is no port from 1 to {LARGEST_PORT}; set another MASTER_PORT"
        )

    is_needed = bool(named) or environment.get("NNODES", "1") != "1"
    use = "the rendezvous of several nodes"
    yield _port(rendezvous, use, key="MASTER_PORT", report=error if is_needed else warning)
    yield _port(SERVE_PORT, "`megadiff serve MODEL`", key="--port", report=warning)


def _port(port: int, use: str, *, key: str, report: Callable[..., Finding]) -> Finding:
    """Say whether a port is free. report: what a taken one is. key: sets another port."""
    name = f"port {port}"
    if not is_taken(port):
        return ok(name, f"free, for {use}")
    text = f"taken by another process; {use} needs it free"
    fix = f"end that process (ss -ltnp 'sport = :{port}'), or set another {key}"
    return report(name, text, fix=fix)


def is_taken(port: int) -> bool:
    """Tell whether another process listens on a port of this host."""
    with socket.socket() as probe:
        # as servers do: a connection that is being closed is no obstacle
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return True
    return False
