"""Write one rank's part of a checkpoint in the background, from a copy in host memory."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from megadiff.process.host_memory import free_bytes, take_host_memory
from megadiff.tensors.snapshot import Snapshot
from megadiff.types import Progress

logger = logging.getLogger(__name__)
# Of what is free: replicas, rewards and the system's page cache want some as well.
COPY_FRACTION = 0.5


class CopyMemory:
    """Hold a rank's copy of its part. Its memory stays from one checkpoint to the next.

    For a GPU it is page-locked, so that the copy takes a second and not ten.
    """

    def __init__(self, device: torch.device) -> None:
        self._locks = device.type == "cuda"
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._has_warned = False

    def copied(self, snapshot: Snapshot) -> Snapshot | None:
        """Return a copy of the snapshot, None where the node has no memory for it."""
        num_bytes = snapshot.num_bytes
        if self._memory.nbytes < num_bytes:
            # given back first, or both would be there for a moment
            self._memory = torch.empty(0, dtype=torch.uint8)
            free = free_bytes()
            if num_bytes > COPY_FRACTION * free:
                if not self._has_warned:
                    logger.warning(
                        "checkpoints are written while training waits: a rank's copy takes %.2f "
                        "GiB, at most %.2f (%.0f %% of what is free for it) may be taken",
                        num_bytes / 2**30,
                        COPY_FRACTION * free / 2**30,
                        100 * COPY_FRACTION,
                    )
                self._has_warned = True
                return None
            self._memory = take_host_memory(num_bytes, for_gpu=self._locks)
        return snapshot.copied(self._memory)


class RankWrite:
    """Write this rank's part of one checkpoint.

    progress: where the run stood. aside: the folder that all ranks write into. error: what wait()
    raises. seconds: how long it took, once it has ended.
    """

    def __init__(self, progress: Progress, aside: Path) -> None:
        self.progress = replace(progress)  # the loop's own goes on
        self.aside = aside
        self._ended = threading.Event()
        self._given_up = threading.Event()
        self.error: Exception | None = None
        self.seconds = 0.0
        self._beside: Callable[[Path], None] | None = None

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    def start(
        self,
        take: Callable[[], Snapshot],
        memory: CopyMemory,
        beside: Callable[[Path], None] | None = None,
    ) -> None:
        """Write a copy in a thread; where there is no memory for one, write before returning.

        beside: writes what belongs beside the weights into the folder.
        """
        self._beside = beside
        try:
            snapshot = take()
            copy = memory.copied(snapshot)
            if copy is None:
                self._write(snapshot)
            else:
                # A daemon: a disk that hangs must not keep the process.
                threading.Thread(target=self._write, args=(copy,), daemon=True).start()
        except Exception as error:  # any kind: a rank that raised alone would hang the others
            self.error = error
            self._ended.set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the end. Raises what writing raised, TimeoutError after timeout_s.

        One that was given up has no end: the rescue that did so is about to end the process.
        """
        if not self._ended.wait(timeout_s):
            raise TimeoutError(f"{self.aside} was not written within {timeout_s} s")
        if self.error:
            raise self.error

    def give_up(self) -> None:
        """Stop after the tensor that is being written."""
        self._given_up.set()

    def _write(self, snapshot: Snapshot) -> None:
        start_s = time.monotonic()
        try:
            # First: a rank's file of weights says that all is there.
            if self._beside:
                self._beside(self.aside)
            snapshot.write(self.aside, self._given_up)
        except Exception as error:  # as above
            self.error = error
        self.seconds = time.monotonic() - start_s
        if not self._given_up.is_set():
            self._ended.set()
