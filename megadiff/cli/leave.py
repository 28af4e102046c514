"""The way out of a command."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """Exit at once: everything is closed by now, and interpreter shutdown would wait for threads whose requests hang."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
