"""Keep the garbage collector from large libraries, in processes that make many objects a step."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


def freeze_startup_objects() -> None:
    """Never walk again through what lives now. Call it when all is loaded, or compiled."""
    # Half a million objects of the libraries live by then, and a third of a million that torch
    # made to compile blocks. A full collection goes through all of them with the GIL held, 0.1 to
    # 0.3 s and more for large models, and each step makes enough objects to set one off.
    gc.collect()
    gc.freeze()


@dataclass
class FirstRounds:
    """Freeze what lives after each of a process's first rounds of work, as torch compiles in them.

    count: of those to come.
    """

    count: int

    def end(self) -> None:
        """Take note of a round's end. After the last of them it does nothing."""
        if self.count > 0:
            self.count -= 1
            freeze_startup_objects()


@contextmanager
def collection_paused() -> Iterator[None]:
    """Collect nothing while libraries are imported, which takes a fifth off: they leave no garbage.

    Nor later: what was imported is never walked through again.
    For one thread. Garbage of before is collected first: frozen, it would stay for good.
    """
    gc.collect()
    with without_collections():
        try:
            yield
        finally:
            gc.freeze()


@contextmanager
def without_collections() -> Iterator[None]:
    """Let Python look for no reference cycles while very many objects are made, none in a cycle.

    It would begin anew whenever there are a few more of them.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
