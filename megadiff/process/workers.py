"""Start worker processes for numpy and cv2 work, which end with the process that started them."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import cv2

from megadiff.process.affinity import start_cpus
from megadiff.process.lifeline import exit_with


def worker_pool(num_workers: int) -> ProcessPoolExecutor:
    """Return a pool of spawned processes.

    A worker imports the parent's main module: its imports at the top cost every worker their time.
    """
    # Not fork: it would copy the parent's locks and its CUDA context.
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(
        num_workers, mp_context=context, initializer=_start, initargs=(os.getpid(),)
    )


def share_of_cores(most: int) -> int:
    """Return this rank's part of the cores that the node's ranks use together, 1 to `most`."""
    # Not cpu_count(): a container or a batch system may give fewer than the machine has.
    # Of those at the start: a rank bound to half of them shares these with half of the ranks.
    cores = len(start_cpus()) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(most, cores))


def _start(parent: int) -> None:
    cv2.setNumThreads(1)  # the workers are what runs in parallel
    # The pool's pipes do not tell a worker that its parent was killed: workers hold both ends.
    exit_with(parent)
