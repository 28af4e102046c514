"""HTTP requests whose answers are bounded in size and in total time.

httpx and httpcore limit the seconds of each read, so an answer of one byte a second never ends.
Here the limit is a deadline for everything, from the connection to the last byte.

Tested with httpcore 1.0.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import httpcore

CONNECT_TIMEOUT_S = 5.0
# Of an idle connection: longer than between two signs of life, so that one connection and its proof
# last for a run; shorter than the replica's own.
KEEP_ALIVE_S = 60.0
GREETING_S = 30.0
GREETING_BYTES = 1 << 16  # of the answer to a connection's first request
WRITE_BYTES = 1 << 18  # between two looks at the clock
TIMED_OUT = 504  # the status of an answer that did not come: the replica may be alive, and busy
UNUSABLE = 502  # the status of an answer that is too large, or not what was asked for


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A whole answer. headers: by their names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def content_type(self) -> str:
        return self.headers.get("content-type", "")

    @property
    def location(self) -> str:
        """Return where a redirect leads, '' where there is none."""
        return self.headers.get("location", "")


class NoAnswer(RuntimeError):
    """The address could not be reached, or the connection broke.

    status: the HTTP status that says as much; None where the other end may be gone.
    """

    status: int | None = None


class AnswerTooLate(NoAnswer):
    """The answer was not whole when its time was over; the connection may be well."""

    status = TIMED_OUT


class NotTrusted(NoAnswer):
    """The address has a certificate that no known authority signed, or that names another host."""

    status = UNUSABLE


class AnswerTooLarge(NoAnswer):
    """The answer is larger than the caller expects; the rest of it was not read."""

    status = UNUSABLE


Exchange = Callable[[str, bytes], Answer]  # POST to a path, with a JSON body


class BoundedHttp:
    """Keep connections to one address, for any number of threads.

    url: http://host:port or https://host:port, reached without a proxy, whatever the environment
    names. Certificates are checked against the system's authorities, or those of SSL_CERT_FILE.
    greet: called with the exchange of each new connection, before anything else goes over it.
    keep_alive_s: an idle connection is used again for so long.
    """

    def __init__(
        self,
        url: str,
        *,
        greet: Callable[[Exchange], None] | None = None,
        keep_alive_s: float = KEEP_ALIVE_S,
    ) -> None:
        self.url = url
        authorities = None
        if url.startswith("https:"):
            authorities = _authorities(os.environ.get("SSL_CERT_FILE"))
        self._pool = httpcore.ConnectionPool(
            ssl_context=authorities,
            # the callers' thread pools are the bound
            max_connections=None,
            keepalive_expiry=keep_alive_s,
            network_backend=_DeadlineBackend(url, greet),
        )

    def close(self) -> None:
        """Close all connections, those in use as well: requests that wait for an answer fail."""
        self._pool.close()

    def request(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str],
        content: bytes | Iterable[bytes] = b"",
        timeout_s: float,
        max_bytes: int,
    ) -> Answer:
        """Send a request and read its whole answer.

        content: needs a Content-Length among the headers where it is not bytes. timeout_s: for
        everything. max_bytes: of the answer's body.
        Raises NoAnswer, of which AnswerTooLate, AnswerTooLarge and NotTrusted are kinds.
        """
        deadline = time.monotonic() + timeout_s
        asked = f"{method} {self.url}{path}"

        try:
            with self._pool.stream(
                method,
                self.url + path,
                headers=list(headers.items()),
                content=content,  # type: ignore[arg-type]  # any iterable will do
                extensions=_until(deadline),
            ) as response:
                return _read(response, max_bytes=max_bytes, asked=asked)
        except (httpcore.ReadTimeout, httpcore.WriteTimeout) as error:
            raise AnswerTooLate(f"{asked} had no whole answer within {timeout_s:.1f} s") from error
        except (httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError) as error:
            reason = error.args[0] if error.args else None  # httpcore drops the cause
            if isinstance(reason, ssl.SSLCertVerificationError):
                raise NotTrusted(
                    f"{asked}: its certificate is not trusted, {reason.verify_message}; "
                    "set SSL_CERT_FILE to the certificate of the authority that signed it"
                ) from error
            raise NoAnswer(f"{asked} failed: {error!r}") from error


@cache
def _authorities(file: str | None) -> ssl.SSLContext:
    """Return what checks certificates. file: of SSL_CERT_FILE, where OpenSSL looks for it itself.

    A registry is looked at every second, with a client for each address: to read the certificates
    takes 50 ms.
    """
    return httpcore.default_ssl_context()


def _until(deadline: float) -> dict[str, dict[str, float]]:
    """Return the extensions of a request that _DeadlineStream ends at this point of time."""
    return {"timeout": {"connect": deadline, "write": deadline, "read": deadline}}


def _read(response: httpcore.Response, *, max_bytes: int, asked: str) -> Answer:
    headers = {
        name.decode("latin-1").lower(): value.decode("latin-1") for name, value in response.headers
    }
    size = int(headers.get("content-length", "0"))  # h11 has checked that it is a number

    # Refused before it is read: who announces much need not be given the time to send it.
    if size > max_bytes:
        raise AnswerTooLarge(f"{asked} answers {size} bytes, its limit is {max_bytes}")

    body = bytearray()
    for chunk in response.iter_stream():
        body += chunk
        if len(body) > max_bytes:
            raise AnswerTooLarge(
                f"{asked} answers over {max_bytes} bytes, its limit is {max_bytes}"
            )

    return Answer(status=response.status, headers=headers, body=bytes(body))


class _DeadlineBackend(httpcore.NetworkBackend):
    """httpcore's sockets, with every timeout of a request taken as a point of time.monotonic().

    httpcore hands a request's timeouts on unchanged; they are the only thing that reaches all of
    its reads, those of the headers included.
    """

    def __init__(self, url: str, greet: Callable[[Exchange], None] | None) -> None:
        self._backend = httpcore.SyncBackend()
        self._url = url
        self._greet = greet

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        seconds = min(CONNECT_TIMEOUT_S, _seconds_left(timeout, httpcore.ConnectTimeout))
        try:
            stream = self._backend.connect_tcp(host, port, seconds, local_address, socket_options)
        except UnicodeError as error:  # of a host name that DNS cannot have
            raise httpcore.ConnectError(f"{host!r:.80} is no host name: {error}") from error
        stream = _DeadlineStream(stream, secured=self._greeted)
        # With TLS it comes after the handshake: nothing goes out before the certificate is checked.
        return stream if self._url.startswith("https:") else self._greeted(stream, timeout)

    def _greeted(
        self, stream: httpcore.NetworkStream, deadline: float | None
    ) -> httpcore.NetworkStream:
        """Greet whoever is at the other end of a new connection, and return the connection."""
        if self._greet is not None:
            try:
                seconds = min(GREETING_S, _seconds_left(deadline, httpcore.ReadTimeout))
                self._greet(self._exchange(stream, time.monotonic() + seconds))
            except BaseException:
                # no pool knows this connection yet: nobody else would close it
                stream.close()
                raise
        return stream

    def _exchange(self, stream: httpcore.NetworkStream, deadline: float) -> Exchange:
        """Return what sends a request over a stream that no pool has yet."""
        connection = httpcore.HTTP11Connection(httpcore.URL(self._url).origin, stream)

        def exchange(path: str, body: bytes) -> Answer:
            with connection.stream(
                "POST",
                self._url + path,
                headers={"Content-Type": "application/json"},
                content=body,
                extensions=_until(deadline),
            ) as response:
                return _read(response, max_bytes=GREETING_BYTES, asked=f"POST {path}")

        return exchange


Secured = Callable[[httpcore.NetworkStream, float | None], httpcore.NetworkStream]


class _DeadlineStream(httpcore.NetworkStream):
    """A socket's stream, which another thread may close while this one waits in it.

    secured: called with what start_tls() makes of it, and the deadline of that.
    """

    def __init__(self, stream: httpcore.NetworkStream, *, secured: Secured) -> None:
        self._stream = stream
        self._secured = secured
        self._lock = threading.Lock()
        self._num_inside = 0  # threads that read or write
        self._is_closed = False

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        with self._inside(httpcore.ReadError):
            return self._stream.read(max_bytes, _seconds_left(timeout, httpcore.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        view = memoryview(buffer)
        for begin in range(0, len(view), WRITE_BYTES):
            seconds = _seconds_left(timeout, httpcore.WriteTimeout)
            chunk = view[begin : begin + WRITE_BYTES]
            with self._inside(httpcore.WriteError):
                self._stream.write(chunk, seconds)  # type: ignore[arg-type]  # sockets take views

    def close(self) -> None:
        """Wake who waits in the stream, and free its descriptor as soon as nobody does.

        poll(2) looks a descriptor up again by its number when it wakes. Freed before that, the
        number may be another socket's, and the thread would wait there until its deadline.
        """
        with self._lock:
            self._is_closed = True
            is_free = not self._num_inside
        # Closing alone would not wake a thread that waits for bytes of this socket.
        with contextlib.suppress(OSError):
            self._stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        if is_free:
            self._stream.close()

    @contextlib.contextmanager
    def _inside(self, closed: type[httpcore.NetworkError]) -> Iterator[None]:
        """Keep the descriptor while a thread uses it; the last one frees that of a closed stream.

        Raises closed where the stream has been closed before.
        """
        with self._lock:
            if self._is_closed:
                raise closed("the connection was closed")
            self._num_inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_inside -= 1
                is_last = self._is_closed and not self._num_inside
            if is_last:
                self._stream.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:
        seconds = min(CONNECT_TIMEOUT_S, _seconds_left(timeout, httpcore.ConnectTimeout))
        stream = self._stream.start_tls(ssl_context, server_hostname, seconds)
        return self._secured(_DeadlineStream(stream, secured=self._secured), timeout)

    def get_extra_info(self, info: str) -> object:
        return self._stream.get_extra_info(info)


def _seconds_left(deadline: float | None, late: type[httpcore.TimeoutException]) -> float:
    assert deadline is not None, "every request has a deadline"
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise late("the time for the whole answer is over")
    return seconds
