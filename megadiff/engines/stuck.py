"""Free a GPU that copies nothing any more, so that a rescue can save what is on it.

A collective runs on for good where another rank never joins it. Meanwhile the main thread may load
a compiled kernel. That waits for all that runs on the GPU and keeps the driver's lock, so that no
other thread can copy anything (CUDA programming guide, "Lazy Loading"). Measured on two H200s: such
a copy never ends, and it ends where the rank's collectives are aborted.

They are not aborted before: ranks on other nodes see that connections are closed.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from megadiff.parallel.collectives import abort_collectives

logger = logging.getLogger(__name__)
STUCK_S = 15.0  # a number's copy may wait behind a tensor's of some GiB
ASK_S = 0.5  # between two copies


def freed_when_stuck(number: Tensor) -> AbstractContextManager[None]:
    """Abort this rank's collectives, within the context, once a number cannot be copied any more.

    number: a tensor on the GPU, of the time when it still answered.
    """
    return called_at_silence(_copies(number), abort_collectives, after_s=STUCK_S)


@contextmanager
def called_at_silence(
    answers: Iterator[None], call: Callable[[], None], *, after_s: float
) -> Iterator[None]:
    """Ask for answers in a thread; call once, when none has come for after_s. An error is one."""
    pause_s = min(ASK_S, after_s / 4)
    lock = threading.Lock()
    over = threading.Event()
    answered_s = time.monotonic()

    def keep_asking() -> None:
        nonlocal answered_s
        try:
            for _ in answers:
                answered_s = time.monotonic()
                if over.wait(pause_s):
                    return
        except RuntimeError as error:
            answered_s = math.inf
            logger.warning("the GPU is not watched any more: %s", error)

    def watch() -> None:
        while not over.wait(pause_s):
            if time.monotonic() - answered_s < after_s:
                continue
            with lock:  # not after the context's end
                if not over.is_set():
                    logger.warning(
                        "the GPU has copied nothing for %g s: aborting this rank's collectives",
                        after_s,
                    )
                    call()
            return

    for work in (keep_asking, watch):
        threading.Thread(target=work, name=f"stuck: {work.__name__}", daemon=True).start()
    try:
        yield
    finally:
        with lock:
            over.set()


def _copies(number: Tensor) -> Iterator[None]:
    """Copy a number to the host, again and again."""
    # one stream for all copies: torch has 32, and a new one each time would soon be one of NCCL's
    stream = torch.cuda.Stream(number.device)
    while True:
        with torch.cuda.stream(stream):
            number.to("cpu")
        yield
