"""Imports of a process that others are forked from, kept from the garbage collector.

A collection writes to every object that it walks through. After a fork that copies each page of
half a gigabyte of libraries: a tenth of the time that the forked tests took.
"""

import gc
import importlib
from collections.abc import Iterable


def import_frozen(modules: Iterable[str]) -> None:
    """Import modules; neither this process nor its children ever walk through their objects."""
    gc.disable()
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    # torch's compiler makes millions of objects: a seventh of its time otherwise.
    gc.set_threshold(50_000, 20, 50)
    gc.enable()
