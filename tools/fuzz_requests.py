"""Make malformed requests to a replica from a seed: nearly right bodies, nearly HTTP."""

from __future__ import annotations

import json
import random
from typing import Any

from megadiff.rollout.wire import requests_to_json
from megadiff.types import Prompt, RolloutRequest, Sampling

RUN = "fuzz"
ROUTES = (
    "/health",
    "/rl/hello",
    "/rl/generate",
    "/rl/weights/places",
    "/rl/weights/begin",
    "/rl/weights/bucket",
    "/rl/weights/commit",
    "/rl/sleep",
    "/rl/trim",
    "/rl/release",
    "/v1/images/generations",
    "/v1/models",
    "/v1/chat/completions",
    "/v1/images/edits",
    "/docs",
)
METHODS = (*["POST"] * 4, "GET", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "BREW")
VALUES = (
    *(None, True, False, -1, 0, 1.5, 10**9, 2**70, -(2**70), 1e308, 128.0),
    *("", "x", "\x00", "\ud800", "9" * 5000, "../../etc/passwd"),
    *([], {}, [[]], [1, 2], {"a": {"b": []}}, ["x"] * 300),
)
HELLO = {"nonce": "0123456789abcdef" * 2, "proof": "0" * 64}  # of the right form, and wrong
SAMPLE = RolloutRequest(
    prompt=Prompt(text="a red star", id="fuzz"),
    sampling=Sampling(height=64, width=64, num_inference_steps=4, sde_window_range=(0, 3)),
    sample_indices=(0, 1),
    seed=3,
    step=1,
)
IMAGE = {"prompt": "a red star", "size": "64x64", "num_inference_steps": 2, "n": 1, "seed": 1}
COSTLY = ("size", "num_inference_steps")
HEADERS = (
    [],
    ["Content-Length: 0"],
    ["Content-Length: -1"],
    ["Content-Length: 1000000000000"],
    ["Content-Length: x"],
    ["Content-Length: 1", "Content-Length: 2"],
    ["Transfer-Encoding: chunked"],
    ["Transfer-Encoding: chunked", "Content-Length: 5"],
    ["Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Key: x"],
    ["Expect: 100-continue", "Content-Length: 5"],
    ["Content-Encoding: gzip", "Content-Length: 5"],
    ["X: " + "y" * 70_000],
    [" folded", "no colon"],
    ["X-Megadiff-Run: " + "z" * 300, "Content-Length: 2"],
)
CONTENT_TYPES = (*["application/json"] * 4, "application/octet-stream", "multipart/form-data", "")


def bodies(manifest: dict) -> dict[str, Any]:
    """Return a body of the right form for each route that takes one; the proof is wrong."""
    return {
        "/rl/hello": HELLO,
        "/rl/generate": requests_to_json([SAMPLE]),
        "/rl/weights/begin": {"version": 1, "manifest": manifest, "lora": None},
        "/rl/weights/bucket": {"transport": "shm", "file": "megadiff-1-x"},
        "/rl/weights/commit": {"version": 1},
        "/v1/images/generations": IMAGE,
    }


def spoiled(value: Any, rng: random.Random) -> Any:
    """Return the JSON value with one node of it dropped, doubled or replaced."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        changed = dict(value)
        key = rng.choice(list(changed))
        if rng.random() < 0.1:
            del changed[key]
        elif rng.random() < 0.1:
            changed[f"{key}_"] = changed[key]
        else:
            changed[key] = spoiled(changed[key], rng)
        return changed
    if isinstance(value, list) and value and rng.random() < 0.85:
        place = rng.randrange(len(value))
        return [*value[:place], spoiled(value[place], rng), *value[place + 1 :]]
    return rng.choice(VALUES)


def body_of(path: str, right: dict[str, Any], rng: random.Random) -> bytes:
    """Return a body that is nearly right, of another route, cut, or noise."""
    value = right.get(path) if rng.random() < 0.9 else rng.choice(list(right.values()))
    value = spoiled(value if value is not None else {}, rng)
    if isinstance(value, dict) and "prompt" in value:
        # Left out or null, they are 1024² pixels and 50 steps: a minute of a CPU for each request.
        value |= {key: IMAGE[key] for key in COSTLY if value.get(key) is None}
    text = json.dumps(value).encode()
    kind = rng.random()
    if kind < 0.7:
        return text
    if kind < 0.8:
        return text[: rng.randrange(len(text) + 1)]
    if kind < 0.9:
        return rng.randbytes(rng.randrange(2000))
    if kind < 0.95:
        return b"[" * rng.randrange(100_000)
    return rng.randbytes(8) + text  # as of safetensors: a length and a header


def raw_request(right: dict[str, Any], token: str, rng: random.Random) -> tuple[bytes, bool]:
    """Return (the bytes of one request, whether an answer to it must come)."""
    path = rng.choice(ROUTES)
    method = rng.choice(METHODS)
    body = body_of(path, right, rng)
    version = rng.choice(["1.1", "1.1", "1.1", "1.0", "9.9"])
    targets = (f"/{path}", f"{path}/..;/", f"{path}?{'a' * 3000}", "*", "%00")
    target = path if rng.random() < 0.6 else rng.choice(targets)
    lines = [f"{method} {target} HTTP/{version}", "Host: x"]
    lines += [f"X-Megadiff-Run: {RUN}"] * rng.randrange(2)
    lines += [f"Authorization: Bearer {token}"] if token else []
    is_right = rng.random() < 0.7
    if is_right:
        lines += [f"Content-Length: {len(body)}"]
    else:
        lines += rng.choice(HEADERS)
    lines += [f"Content-Type: {rng.choice(CONTENT_TYPES)}", "", ""]
    return "\r\n".join(lines).encode("utf-8", "replace") + body, is_right


def named(token: str) -> dict[str, str]:
    """Return the headers of the run that owns the replica."""
    return {"X-Megadiff-Run": RUN} | ({"Authorization": f"Bearer {token}"} if token else {})
