"""A server of scores that fails as a test wants."""

from __future__ import annotations

import io
import itertools
import json
import ssl
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any

import numpy as np

from tests.unit.process.strangers import Stranger, drip, flood, reply

SLOW_S = 0.3


def good_answer(path: str, body: bytes) -> Any:
    """Return what a server without a fault answers. A score is the mean of its pixels."""
    if path == "/score":
        pixels = np.load(io.BytesIO(body))["pixels"]
        return {"scores": (pixels.reshape(len(pixels), -1).mean(1) / 255).tolist()}
    return {"ready": True}


def fault_server(
    fault: str = "",
    *,
    times: int | None = None,
    port: int = 0,
    tls: ssl.SSLContext | None = None,
) -> Stranger:
    """Spoil the first `times` requests but those for "/", None for all of them."""
    numbers = itertools.count()

    def answer(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        good = good_answer(handler.path, body)
        if fault and handler.path != "/" and (times is None or next(numbers) < times):
            FAULTS[fault](handler, good)
        else:
            _say(handler, good)

    return Stranger(answer, port=port, tls=tls)


def _say(handler: BaseHTTPRequestHandler, answer: Any) -> None:
    reply(handler, json.dumps(answer).encode())


def _slow(handler: BaseHTTPRequestHandler, good: Any) -> None:
    time.sleep(SLOW_S)
    _say(handler, good)


def _half(handler: BaseHTTPRequestHandler, good: Any) -> None:
    body = json.dumps(good).encode()
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body[: len(body) // 2])
    handler.close_connection = True


def _hang(handler: BaseHTTPRequestHandler, good: Any) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "100")
    handler.end_headers()
    time.sleep(20)


def _redirect(handler: BaseHTTPRequestHandler, good: Any) -> None:
    handler.send_response(307)
    handler.send_header("Location", "http://127.0.0.1:1/elsewhere")
    handler.send_header("Content-Length", "0")
    handler.end_headers()


def _status(status: int) -> Callable[[BaseHTTPRequestHandler, Any], None]:
    body = b'{"error": "because of the fault"}'
    return lambda handler, good: reply(handler, body, status=status)


def _changed(scores: Callable[[list], list]) -> Callable[[BaseHTTPRequestHandler, Any], None]:
    return lambda handler, good: _say(handler, {"scores": scores(good["scores"])})


FAULTS: dict[str, Callable[[BaseHTTPRequestHandler, Any], None]] = {
    "slow": _slow,
    "500": _status(500),
    "429": _status(429),
    "422": _status(422),
    "410": _status(410),
    "half": _half,
    "hang": _hang,
    "drip": lambda handler, good: drip(handler, b""),
    "flood": lambda handler, good: flood(handler, b""),
    "redirect": _redirect,
    "html": lambda handler, good: reply(handler, b"<html>proxy error</html>"),
    "nan": _changed(lambda values: [float("nan"), *values[1:]]),
    "null": _changed(lambda values: [None, *values[1:]]),
    "short": _changed(lambda values: values[:-1]),
}
