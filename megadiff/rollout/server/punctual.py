"""Set deadlines that uvicorn lacks: of a request's headers, and of an answer that is not read.

Those of a body are megadiff.rollout.server.body's.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any, ClassVar

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEADERS_S = 10.0  # from the connection's begin, or a later request's first byte, to their end
HEADER_BYTES = 2**16
UNREAD_S = 60.0  # an answer of which nothing is taken, or the rest of a body that was refused
MAX_STRANGERS = 256  # connections that never sent a request; one more ends the oldest
TIMED_OUT = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class PunctualProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # one of two classes
    """Add deadlines to uvicorn's own protocol, which keeps half a request for ever."""

    strangers: ClassVar[dict[PunctualProtocol, None]] = {}  # oldest first

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._deadline: asyncio.TimerHandle | None = None
        self._unread_deadline: asyncio.TimerHandle | None = None
        self._num_header_bytes = 0
        self._expect_within(HEADERS_S)
        self.strangers[self] = None
        if len(self.strangers) > MAX_STRANGERS:
            next(iter(self.strangers)).transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._forget_deadline()
        self.resume_writing()  # ends the other deadline
        self.strangers.pop(self, None)
        super().connection_lost(error)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.transport.is_closing():
            return

        if self.cycle is not None and not self.cycle.response_complete:
            self.strangers.pop(self, None)  # a whole request's headers came
            self._num_header_bytes = 0
            self._forget_deadline()
        elif self.cycle is not None and self.cycle.more_body:
            # what follows a request that was refused before its body was read
            self._expect_within(UNREAD_S)
        else:
            self._num_header_bytes += len(data)
            self._expect_within(HEADERS_S)
            if self._num_header_bytes > HEADER_BYTES:
                self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader(math.inf)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread_deadline is not None:
            self._unread_deadline.cancel()
            self._unread_deadline = None

    def _watch_reader(self, size_before: float) -> None:
        """End the connection when nothing was taken of the answer since the last look."""
        size = self.transport.get_write_buffer_size()
        if size < size_before:
            self._unread_deadline = self.loop.call_later(UNREAD_S, self._watch_reader, size)
        else:
            self.transport.abort()

    def _expect_within(self, seconds: float) -> None:
        """Start the clock, unless it runs: a byte now and then does not wind it up again."""
        if self._deadline is None:
            self._deadline = self.loop.call_later(seconds, self._end)

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _end(self) -> None:
        if self.transport.is_closing():
            return
        if self.cycle is None:  # else it had its answer
            self.transport.write(TIMED_OUT)
        self.transport.close()
