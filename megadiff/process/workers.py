"""Worker processes for numpy and cv2 work: spawned, one thread each, gone when the process that started them is."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import cv2

from megadiff.process.lifeline import exit_with


def worker_pool(num_workers: int) -> ProcessPoolExecutor:
    """A pool of spawned processes: a fork would copy the parent's locks and its CUDA context.

    A worker imports the parent's main module, so what that imports at its top costs each of them its time.
    """
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(
        num_workers, mp_context=context, initializer=_start, initargs=(os.getpid(),)
    )


def share_of_cores(most: int) -> int:
    """Cores of this process where the ranks of a node share them, 1 to `most`."""
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(most, cores))


def _start(parent: int) -> None:
    """The pool's own pipes do not tell a worker that its parent was killed: the workers hold both of their ends."""
    cv2.setNumThreads(1)  # the workers are what runs in parallel
    exit_with(parent)
