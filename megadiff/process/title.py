"""Name this process in ps and top by what it does, in place of its command line."""

from __future__ import annotations

import os


def set_title(text: str) -> None:
    """Show `megadiff TEXT` from now on, cut to the command line's length.

    Every user of the host can read it: no secret goes in.
    """
    # Else a title takes the environment's memory, and nobody can tell by /proc/PID/environ any
    # more which rank or job a process is of. The library reads it at its first use.
    os.environ["SPT_NOENV"] = "1"
    from setproctitle import setproctitle

    setproctitle(f"megadiff {text}")
