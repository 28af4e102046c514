"""Move a bucket through the process group of transport `nccl`, in the background."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

# Of building the group of those that joined, and of one bucket's transfer. The trainer tells its
# workers, and may ask for less.
TIMEOUT_S = 30.0
POLL_S = 0.005  # between looks at a broadcast, and at who has joined


def send(
    group: dist.ProcessGroup, flat: Tensor, *, number: int, world_size: int, timeout_s: float
) -> list[Future[None]]:
    """Start a transfer from rank 0 to all others. number: of the bucket in this group.

    Returns one future for each other rank in their order, between GPUs one for all.
    """
    if flat.device.type == "cuda":
        return [broadcast(group, flat, timeout_s=timeout_s)]
    # In gloo's broadcast all would wait for a worker that is gone, so each has its own message.
    tag = message_tag(number, len(flat))
    return [
        message(partial(group.send, [flat], peer, tag), timeout_s=timeout_s)
        for peer in range(1, world_size)
    ]


def receive(
    group: dist.ProcessGroup, flat: Tensor, *, number: int, timeout_s: float
) -> Future[None]:
    """Start the other end of send()."""
    if flat.device.type == "cuda":
        return broadcast(group, flat, timeout_s=timeout_s)
    tag = message_tag(number, len(flat))
    return message(partial(group.recv, [flat], 0, tag), timeout_s=timeout_s)


def message(start: Callable[[], dist.Work], *, timeout_s: float) -> Future[None]:
    """Start a message by gloo, and wait for its end in the background."""
    try:
        work = start()
    except RuntimeError as error:
        # The peer has closed its connection before: that peer's transfer failed, and no other's.
        failed: Future[None] = Future()
        failed.set_exception(error)
        return failed
    return in_background(partial(work.wait, timedelta(seconds=timeout_s)))


def message_tag(number: int, num_bytes: int) -> int:
    """Return gloo's tag of a bucket: no other bucket and no other size is taken for it.

    gloo fills a buffer in part with a message that is too short, and ends the process for one that
    is too long.
    """
    # 31 bits: gloo's tags are signed.
    return zlib.crc32(f"{number} {num_bytes}".encode()) >> 1


def broadcast(group: dist.ProcessGroup, flat: Tensor, *, timeout_s: float) -> Future[None]:
    """Start a broadcast from rank 0 by NCCL, and wait for its end in the background."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    work = group.broadcast([flat], options)
    deadline = time.monotonic() + timeout_s

    def finish() -> None:
        # NCCL's own wait() only makes a stream wait, and has no timeout for this thread.
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise TimeoutError(f"a broadcast of {len(flat)} bytes took over {timeout_s:g} s")
            time.sleep(POLL_S)
        # With a timeout: only then does NCCL raise the error that it ended by.
        work.wait(timedelta(seconds=timeout_s))

    return in_background(finish)


def abandon(group: dist.ProcessGroup, pending: Sequence[Future[None]]) -> None:
    """End a group that may be broken, in the background."""

    def leave(last_reference: list[dist.ProcessGroup]) -> None:
        # NCCL is stopped at once. gloo cannot be: to destroy it holds the interpreter's lock until
        # its transfers end, also one that nobody receives. So they are waited for first.
        if isinstance(last_reference[0], dist.ProcessGroupGloo):
            wait(pending)
        else:
            last_reference[0].abort()
        last_reference.clear()

    in_background(partial(leave, [group]))


def in_background(call: Callable[[], Any]) -> Future[Any]:
    """Return the call's future, from a thread that no exit waits for."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name="weights-group", daemon=True).start()
    return future
