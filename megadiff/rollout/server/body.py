"""Read a request's body, as bytes or JSON, within bounds of size and time."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

from megadiff.rollout.server.policy import Refused

BODY_SILENT_S = 30.0  # without a byte of a body that is not whole
BODY_BYTES_PER_S = 2**18  # the least rate beyond those seconds: 8 GiB may take nine hours


class PromptBody:
    """Wrap ASGI's `receive`: raise Refused(408) when the client stops in the middle of the body.

    Only the time that is spent waiting for the client counts: a replica that is busy reads later.
    """

    def __init__(self, receive: Any) -> None:
        self._receive = receive
        self._is_whole = False
        self._num_bytes = 0
        self._waited_s = 0.0

    async def __call__(self) -> Any:
        if self._is_whole:  # what comes now says that the client left
            return await self._receive()

        start = time.monotonic()
        spare_s = BODY_SILENT_S + self._num_bytes / BODY_BYTES_PER_S - self._waited_s
        try:
            async with asyncio.timeout(min(BODY_SILENT_S, spare_s)):
                message = await self._receive()
        except TimeoutError:
            raise Refused(
                408,
                f"the body stopped after {self._num_bytes} bytes: nothing came for "
                f"{BODY_SILENT_S:.0f} s, or less than {BODY_BYTES_PER_S} bytes/s; send it again",
            ) from None

        self._waited_s += time.monotonic() - start
        self._num_bytes += len(message.get("body", b""))
        self._is_whole = not message.get("more_body", False)
        return message


async def chunks(receive: Any) -> AsyncIterator[bytes]:
    """Yield the body's bytes as they come.

    Raises ConnectionError when the client leaves before their end.
    """
    message = {"more_body": True}
    while message.get("more_body"):
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError("the client left before the end of its body")
        yield message.get("body", b"")


async def read_json(receive: Any, max_bytes: int) -> Any:
    """Return the body's JSON value.

    Raises Refused(413) past the limit, and ValueError when it is not JSON.
    """
    body = bytearray()
    async for chunk in chunks(receive):
        body += chunk
        if len(body) > max_bytes:
            raise Refused(
                413, f"the JSON body exceeds {max_bytes} bytes; send fewer requests at once"
            )
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:  # also of Unicode, and of integers too long
        raise ValueError(f"the body is not JSON: {error}") from None
