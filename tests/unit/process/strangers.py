"""Addresses that answer as a test wants."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Stranger:
    """An address that answers everything with one function, and keeps what it was asked."""

    def __init__(
        self,
        answer: Callable[[BaseHTTPRequestHandler, bytes], None],
        *,
        port: int = 0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.asked: list[tuple[str, dict[str, str], bytes]] = []
        stranger = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"  # connections are kept
            disable_nagle_algorithm = True  # else a body waits 40 ms for its headers' receipt

            def do_GET(self) -> None:  # noqa: N802, its name in http.server
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                stranger.asked.append((self.path, dict(self.headers), body))
                answer(self, body)

            do_POST = do_GET  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                pass  # who asked has hung up, as it should

        self._server = Server(("127.0.0.1", port), Handler)
        if tls:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Stranger:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def reply(handler: BaseHTTPRequestHandler, body: bytes, *, status: int = 200) -> None:
    """Send a whole answer."""
    handler.send_response(status)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def drip(handler: BaseHTTPRequestHandler, _: bytes) -> None:
    """Send a byte of the body now and then, for a minute."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    for _ in range(600):
        handler.wfile.write(b" ")
        time.sleep(0.1)


def drip_headers(handler: BaseHTTPRequestHandler, _: bytes) -> None:
    """Send a byte of the headers now and then, for a minute."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Long: ")
    for _ in range(600):
        handler.wfile.write(b"x")
        time.sleep(0.1)


def flood(handler: BaseHTTPRequestHandler, _: bytes) -> None:
    """Send a body without an end."""
    handler.send_response(200)
    handler.end_headers()
    while True:
        handler.wfile.write(bytes(1 << 16))
