"""Name this process in ps and top by what it does, in place of its command line."""

from __future__ import annotations

from setproctitle import setproctitle


def set_title(text: str) -> None:
    """Show `megadiff TEXT` from now on. Every user of the host can read it: no secret goes in."""
    setproctitle(f"megadiff {text}")
