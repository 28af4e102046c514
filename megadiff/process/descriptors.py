"""Let a process open as many files as it needs: above all a rank's sockets to its world.

Systems give a process 1024 at first (the soft limit), and let it ask for more (the hard one).
"""

from __future__ import annotations

import os
import resource

SPARE_DESCRIPTORS = 64  # for all that a process opens beside
# Some programs that a process starts close every number up to the soft limit. The hard one may be
# a thousand million, which takes them minutes.
MOST_DESCRIPTORS = 1 << 16
OTHER_SOCKETS = 2  # of a rank: torchrun's store, and the port where gloo listens


def raise_soft_limit() -> None:
    """Let this process, and those that it starts, open as many files as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_DESCRIPTORS
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def reserve_descriptors(count: int, *, what: str) -> None:
    """Make room for so many more open files, raising the process's soft limit where it is lower.

    Raises ValueError, which names `what` needs them, when the hard limit is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # those of libraries count, too
    num_open = len(os.listdir("/proc/self/fd"))
    needed = num_open + count + SPARE_DESCRIPTORS
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return

    if hard != resource.RLIM_INFINITY and needed > hard:
        raise ValueError(
            f"{what} needs {count} files open at once, but this process may open {hard} and has "
            f"{num_open}; raise that limit (ulimit -Hn), or use fewer ranks"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def rank_sockets(*, world_size: int, sp: int, tp: int, dp_replicate: int, backend: str) -> int:
    """Count the sockets of a rank's gloo groups: one to each peer of each group.

    Without those of NCCL, which come beside them, and of a node's own group. backend: as in
    engine.backend; its groups are as VeOmni 0.1.12 and megatron-core 0.16.1 make them.
    """
    peers = sp * tp
    dp = max(1, world_size // peers)
    # of init_mesh: WORLD, cpu_group, dp_group, cpu_model_group
    sizes = [world_size, world_size, dp, peers]
    if backend == "megatron":
        sizes += [world_size] * 3 + [dp * sp] * 3
    if backend == "veomni" and sp > 1:
        sizes += [dp, sp, dp, sp]
    if backend == "veomni" and dp_replicate > 1:
        sizes += [dp // dp_replicate, dp_replicate]
    return sum(size - 1 for size in sizes) + OTHER_SOCKETS
