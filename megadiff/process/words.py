"""Write counts with their nouns."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """Return `1 replica`, `2 replicas`: the noun gets an s but for one."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
