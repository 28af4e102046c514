"""The registry's file of a replica: written once it listens, gone before it hangs up."""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

import uvicorn

from megadiff.observe.text_files import write_whole

logger = logging.getLogger(__name__)


class AnnouncedServer(uvicorn.Server):
    """Announce a server between its start and its shutdown.

    Who finds an announcement asks at once, so it comes after the listener. A connection that closes
    looks like a crash, unless the announcement is gone by then.
    """

    def __init__(self, config: uvicorn.Config, announced: AbstractContextManager[None]) -> None:
        """announced: entered once the server listens. Enter `announcement` around serve()."""
        super().__init__(config)
        self._announced = announced
        self.announcement = ExitStack()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then announce it."""
        await super().startup(sockets)
        if self.started:
            self.announcement.enter_context(self._announced)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Withdraw the announcement, then close idle connections and finish the calls in flight."""
        self.announcement.close()
        await super().shutdown(sockets)


@contextmanager
def announced(registry: Path | None, *, name: str, url: str) -> Iterator[None]:
    """Keep `registry/<name>.json`, with name, url, pid and process, while the context lasts.

    process: a random number, as containers and ports are taken again by processes of the same pid.

    Nothing is written when registry is None. Of two replicas of one name the later one is
    announced, and stays so when the earlier one ends.
    """
    if registry is None:
        yield
        return

    path = registry / f"{name}.json"
    entry = {"name": name, "url": url, "pid": os.getpid(), "process": secrets.token_hex(8)}
    registry.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(entry))

    try:
        yield
    finally:
        is_ours = False
        with suppress(OSError, ValueError):  # whoever may write there may have changed it
            is_ours = json.loads(path.read_text("utf-8")) == entry
        if is_ours:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:  # the calls in flight are finished all the same
                logger.warning("%s could not be removed: %s", path, error)
