"""Free a GPU that answers no copy any more, so that a rescue can save what is on it.

A collective runs on for good where another rank never joins it. Meanwhile the main thread may load
a compiled kernel. That waits for all that runs on the GPU and keeps the driver's lock, so that no
other thread can copy anything (CUDA programming guide, "Lazy Loading"). Measured on two H200s: a
copy then never ends. It ends once the rank's collectives are aborted.

They are not aborted before, as ranks on other nodes would see closed connections.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from megadiff.parallel.collectives import abort_collectives
from megadiff.tensors.snapshot import Snapshot

logger = logging.getLogger(__name__)
STUCK_S = 15.0  # a number's copy may wait behind a tensor's of some GiB
ASK_S = 0.5  # between two copies


@contextmanager
def freed_when_stuck(snapshot: Snapshot) -> Iterator[None]:
    """Abort this rank's collectives as soon as no tensor of a snapshot can be copied any more."""
    shards = (shard.local for shards in snapshot.shards.values() for shard in shards)
    on_gpu = next((tensor for tensor in shards if tensor.is_cuda and tensor.numel()), None)
    if on_gpu is None:  # there is nothing to wait for
        yield
        return
    # one for all copies: torch has 32, which it gives out in turn, NCCL's among them
    ask = partial(_copy_one, on_gpu.detach(), torch.cuda.Stream(on_gpu.device))
    with called_at_silence(ask, abort_collectives, after_s=STUCK_S):
        yield


@contextmanager
def called_at_silence(
    ask: Callable[[], object], call: Callable[[], None], *, after_s: float
) -> Iterator[None]:
    """Ask again and again in a thread; once no call of `ask` has returned for after_s, `call`."""
    pause_s = min(ASK_S, after_s / 4)
    over = threading.Event()
    answered_s = time.monotonic()

    def keep_asking() -> None:
        nonlocal answered_s
        while not over.wait(pause_s):
            ask()
            answered_s = time.monotonic()

    def watch() -> None:
        while not over.wait(pause_s):
            if time.monotonic() - answered_s >= after_s:
                logger.warning(
                    "the GPU has copied nothing for %g s: aborting this rank's collectives", after_s
                )
                call()
                return

    for work in (keep_asking, watch):
        threading.Thread(target=work, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _copy_one(tensor: Tensor, stream: torch.cuda.Stream) -> None:
    """Copy one number to the host, on a stream that waits for nothing else."""
    with torch.cuda.stream(stream):
        tensor[(0,) * tensor.ndim].to("cpu")
