"""A finding of the doctor: what was looked at, what it is, and how to mend it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "error", "skipped"]
NAME_WIDTH = 18
WIDTH = 100  # characters of a line
INDENT = " " * (9 + NAME_WIDTH)
UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
DEFAULT_FIX = "see docs/troubleshooting.md"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Say of one thing how it is.

    text: with both numbers, what is and what is needed. fix: what to do, "" where nothing is.
    """

    name: str
    status: Status
    text: str
    fix: str = ""


def ok(name: str, text: str) -> Finding:
    """Report what is as it should be."""
    return Finding(name=name, status="ok", text=text)


def warning(name: str, text: str, *, fix: str) -> Finding:
    """Report what a run may survive."""
    return Finding(name=name, status="warning", text=text, fix=fix)


def error(name: str, text: str, *, fix: str) -> Finding:
    """Report what stops a run."""
    return Finding(name=name, status="error", text=text, fix=fix)


def skipped(name: str, reason: str, *, fix: str = "") -> Finding:
    """Report what could not be looked at, and why."""
    return Finding(name=name, status="skipped", text=reason, fix=fix)


def refusal(name: str, message: str, *, fix: str = "") -> Finding:
    """Split an error message of megadiff, which ends in "; " and the fix.

    fix: replaces the message's own.
    """
    text, _, last = message.rpartition("; ")
    if fix or not text:
        return error(name, message, fix=fix or DEFAULT_FIX)
    return error(name, text, fix=last)


def size_text(num_bytes: int) -> str:
    """Write a number of bytes in the largest unit of which there is one."""
    for unit, size in UNITS:
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} bytes"


def to_lines(finding: Finding) -> Iterator[str]:
    """Yield the lines for people: status, name and text, and the fix below."""
    head = f"{finding.status:<9}{finding.name:<{NAME_WIDTH}}"
    yield from _wrapped(finding.text, first=head)
    if finding.fix:
        yield from _wrapped(finding.fix, first=f"{INDENT}fix: ")


def _wrapped(text: str, *, first: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=INDENT,
        # paths and commands are copied from here
        break_long_words=False,
        break_on_hyphens=False,
    )
