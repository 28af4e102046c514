"""The routes of a real replica, at an address."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.unit.rollout.served import serving


@contextmanager
def replica_routes(name: str, *, token: str | None = None) -> Iterator[str]:
    """Serve a replica's routes without an engine behind them; yields the url that it signs."""
    with tempfile.TemporaryDirectory() as folder:
        with serving({}, Path(folder), name=name, token=token) as url:
            yield url
