"""Keep the garbage collector from large libraries, in processes that make many objects a step."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def freeze_startup_objects() -> None:
    """Never walk again through the objects that live now. Call it once, when all is loaded."""
    # Half a million objects of the libraries live by then. A full collection goes through all of
    # them, 0.1 s and more with the GIL held, and each step makes enough objects to set one off.
    gc.collect()
    gc.freeze()


@contextmanager
def collection_paused() -> Iterator[None]:
    """Collect nothing while libraries are imported, which takes a fifth off: they leave no garbage.

    Nor later: what was imported is never walked through again.
    For one thread. Garbage of before is collected first: frozen, it would stay for good.
    """
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
