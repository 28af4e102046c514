"""Write counts with their nouns, large ones short, and errors as sentences."""

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


def error_text(error: BaseException) -> str:
    """Return an error's text, without the name of its class where the text is a sentence of ours.

    Libraries' own errors often say little without their class.
    """
    text = str(error)
    is_ours = type(error).__module__.partition(".")[0] == "megadiff"
    # Not its subclasses, such as UnicodeDecodeError.
    if text and (is_ours or type(error) is ValueError):
        return text
    return f"{type(error).__name__}: {text}"
