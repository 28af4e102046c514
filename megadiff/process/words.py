"""Write counts with their nouns, and large ones short."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """Return `1 replica`, `2 replicas`: the noun gets an s but for one."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def short_count(count: int) -> str:
    """Return `20.4 B`, `1.7 M`, `3.2 k`: three digits of a count of parameters."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)
