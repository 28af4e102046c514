"""The garbage collector, in processes that load large libraries once and then make many objects a step."""

from __future__ import annotations

import gc


def freeze_startup_objects() -> None:
    """Call once, when everything is loaded: what lives now is never walked through again.

    Half a million objects of the libraries live by then. A full collection goes through all of them, 0.1 s and more
    with the GIL held, and each step makes enough objects (a few a sample) to set one off.
    """
    gc.collect()
    gc.freeze()
