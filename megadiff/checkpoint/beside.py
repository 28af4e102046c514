"""Name what a checkpoint may hold beside the weights, as a protocol."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol


class Beside(Protocol):
    """Write files beside the weights of a step, such as the samples of the next one."""

    def settle(self) -> None:
        """Wait until all ranks can write. Collective."""

    def writer(self, step: int) -> Callable[[Path], None] | None:
        """Return what writes this rank's files after `step` steps, None where it has none.

        Not collective. What it writes does not change any more: it may run in a thread, and later.
        """

    def drop_incomplete(self, folder: Path, step: int) -> None:
        """Remove the files, on rank 0, where a rescue could not write those of all ranks."""
