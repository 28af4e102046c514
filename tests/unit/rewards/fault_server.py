"""A server of scores and of vLLM's API that fails as a test wants."""

from __future__ import annotations

import copy
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

TOKEN_IDS = {"Yes": 1, "yes": 2, " Yes": 3, " yes": 4, "No": 5, "no": 6, " No": 7, " no": 8}
SLOW_S = 0.3


def good_answer(path: str, body: bytes) -> Any:
    """Return what a server without a fault answers. A score is the mean of its pixels."""
    if path == "/score":
        pixels = np.load(io.BytesIO(body))["pixels"]
        return {"scores": (pixels.reshape(len(pixels), -1).mean(1) / 255).tolist()}
    if path == "/v1/models":
        return {"data": [{"id": "fake"}]}
    if path == "/tokenize":
        return {"tokens": [TOKEN_IDS.get(json.loads(body)["prompt"], 9)]}
    if path == "/v1/chat/completions":
        tops = [{"token": f"token_id:{number}", "logprob": -2.0} for number in range(1, 9)]
        message = {"content": "4"}
        return {
            "choices": [{"message": message, "logprobs": {"content": [{"top_logprobs": tops}]}}]
        }
    return {"ready": True}


def fault_server(
    fault: str = "",
    *,
    times: int | None = None,
    port: int = 0,
    tls: ssl.SSLContext | None = None,
) -> Stranger:
    """Spoil the first `times` requests for scores and completions, None for all of them."""
    numbers = itertools.count()

    def answer(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        good = good_answer(handler.path, body)
        asked = handler.path in ("/score", "/v1/chat/completions")
        if fault and asked and (times is None or next(numbers) < times):
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
    """Change the list of scores, or of the first token's log probabilities."""

    def answer(handler: BaseHTTPRequestHandler, good: Any) -> None:
        good = copy.deepcopy(good)
        if "scores" in good:
            good["scores"] = scores(good["scores"])
        else:
            content = good["choices"][0]["logprobs"]["content"][0]
            values = scores([top["logprob"] for top in content["top_logprobs"]])
            pairs = zip(content["top_logprobs"], values, strict=False)
            content["top_logprobs"] = [{**top, "logprob": value} for top, value in pairs]
        _say(handler, good)

    return answer


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
